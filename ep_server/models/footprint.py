"""Memory of a rank's weights, computed from config.json alone, without torch.

Follows weights.py tensor by tensor. Units: bytes, for one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ep_server import _C
from ep_server.models.families.spec import FP8_BLOCK, GqaSpec, MlaSpec, ModelSpec, QkNorm
from ep_server.models.sizes import Dtype

FLOAT32 = 4
Part = tuple[str, int]  # (name of the part, bytes)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Weights of a model. replicated: by part, on every rank. expert: one expert of one layer."""

    replicated: dict[str, int]
    expert: int
    sparse_layers: int

    def rank_bytes(self, placement: Sequence[int], num_ranks: int) -> tuple[int, ...]:
        """Weights of each rank. placement: [E] owner of each expert."""
        owned = Counter(placement)
        fixed = sum(self.replicated.values())
        return tuple(fixed + owned[rank] * self.expert * self.sparse_layers for rank in range(num_ranks))


def footprint(spec: ModelSpec, dtype: Dtype, *, packed: bool = True) -> Footprint:
    """Sizes of a model as served.

    Args:
        packed: as the CPU kernels want it, in whole panels; else as GPU ranks keep it, FP8 experts as FP8.
    """
    sizes = _Sizes(dtype, packed)
    parts: Counter[str] = Counter()
    for name, number in _replicated(spec, sizes):
        parts[name] += number
    return Footprint(dict(parts), _expert(spec, sizes), sum(spec.sparse_layers))


def stay_fp8(spec: ModelSpec, dtype: Dtype) -> bool:
    """GPU ranks keep the experts of such a checkpoint as FP8 (weights.py)."""
    return spec.fp8_blocks and dtype is Dtype.BFLOAT16


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of one tensor."""

    dtype: Dtype
    packed: bool

    def plain(self, *shape: int) -> int:
        size = self.dtype.itemsize
        for length in shape:
            size *= length
        return size

    def linear(self, n: int, k: int) -> int:
        if not self.packed:
            return self.plain(n, k)
        return 4 * _C.packed_linear_words(self.dtype is Dtype.BFLOAT16, n, k)

    def router(self, experts: int, hidden: int) -> int:
        """Stays float32."""
        return 4 * _C.packed_linear_words(False, experts, hidden) if self.packed else 4 * experts * hidden

    def ffn(self, ffn: int, hidden: int) -> int:
        """Gate, up and down."""
        if not self.packed:
            return self.plain(3, ffn, hidden)
        gate_up = 4 * _C.packed_gated_words(self.dtype is Dtype.BFLOAT16, ffn, hidden)
        return gate_up + self.linear(hidden, ffn)


def _replicated(spec: ModelSpec, sizes: _Sizes) -> Iterator[Part]:
    yield "embedding", sizes.plain(spec.vocab_size, spec.hidden)
    # A tied head is the embedding once more where matrices are packed.
    if sizes.packed or not spec.tied_head:
        yield "head", sizes.linear(spec.vocab_size, spec.hidden)
    yield "norms", sizes.plain(1 + 2 * spec.num_layers, spec.hidden)
    attention = spec.attention
    one = _gqa(spec, attention, sizes) if isinstance(attention, GqaSpec) else _mla(spec, attention, sizes)
    yield "attention", spec.num_layers * one
    sparse = sum(spec.sparse_layers)
    experts = spec.router.num_experts
    yield "router", sparse * (sizes.router(experts, spec.hidden) + spec.router.bias * experts * FLOAT32)
    if spec.shared_ffn:
        yield "shared experts", sparse * sizes.ffn(spec.shared_ffn, spec.hidden)
    if sparse < spec.num_layers:
        yield "dense FFN", (spec.num_layers - sparse) * sizes.ffn(spec.dense_ffn, spec.hidden)


def _expert(spec: ModelSpec, sizes: _Sizes) -> int:
    """One expert of one layer."""
    ffn, hidden = spec.expert_ffn, spec.hidden
    if sizes.packed or not stay_fp8(spec, sizes.dtype):
        return sizes.ffn(ffn, hidden)
    scales = 3 * -(-ffn // FP8_BLOCK) * -(-hidden // FP8_BLOCK)
    return 3 * ffn * hidden + scales * FLOAT32


def _gqa(spec: ModelSpec, a: GqaSpec, sizes: _Sizes) -> int:
    """One layer."""
    q_rows, kv_rows = a.heads * a.head_dim, a.kv_heads * a.head_dim
    rows = q_rows + 2 * kv_rows
    norm = 0 if a.qk_norm is QkNorm.NONE else sizes.plain(q_rows + kv_rows)  # HEAD: repeated for each head
    bias = sizes.plain(rows + spec.hidden) if a.bias else 0
    return sizes.linear(rows, spec.hidden) + sizes.linear(spec.hidden, q_rows) + norm + bias


def _mla(spec: ModelSpec, a: MlaSpec, sizes: _Sizes) -> int:
    """One layer."""
    q_rows = a.heads * (a.nope_dim + a.rope_dim)
    down = (a.q_lora or q_rows) + a.kv_lora + a.rope_dim
    up = a.heads * (sizes.linear(a.kv_lora, a.nope_dim) + sizes.linear(a.v_dim, a.kv_lora))
    query = sizes.linear(q_rows, a.q_lora) + sizes.plain(a.q_lora) if a.q_lora else 0
    bias = sizes.plain(down + spec.hidden) if a.bias else 0
    out = sizes.linear(spec.hidden, a.heads * a.v_dim)
    return sizes.linear(down, spec.hidden) + sizes.plain(a.kv_lora) + up + out + query + bias
