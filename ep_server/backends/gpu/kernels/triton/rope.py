"""Between projections and attention: q/k norm, rotary embedding, and the write into the cache.

    store_gqa  clip, per-head RMS norm of q and k, rotation; q to its tensor, k and v to the cache
    store_mla  RMS norm of the latent, rotation of its key, both to the cache; rotation of the queries

A pair (a, b) becomes (a cos - b sin, a sin + b cos). Pairs are channels (2i, 2i + 1) if `interleaved`, else
(i, i + dim / 2). Arithmetic is float32 from load to store, with one rounding. A token with a negative slot is
padding: only its slot is read. Two tokens of a call never share a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.launch import (
    FLOATS,
    INTEGERS,
    after_previous,
    block,
    early,
    expect,
)
from ep_server.backends.gpu.kernels.triton.paged import PagedKv, to_code
from ep_server.backends.gpu.kernels.triton.partial import Partial, load_sum, operand
from ep_server.errors import InternalError

BLOCK_HEADS = 4  # per program
_MANY_TOKENS, _MANY_HEADS = 512, 8  # with more tokens, larger programs: the grid has many rounds anyway


@dataclass(frozen=True, slots=True)
class Rotation:
    """Positions of tokens and the rotation for each position.

    table: [positions, dim / 2, 2] float32, cos and sin of every possible position.
    positions, slots: [T] int64 (or int32); slot = block * block_size + offset, negative = padding.
    """

    table: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    interleaved: bool = True

    def check(self, tokens: int, dim: int) -> None:
        """Raises InternalError for tables that do not fit `tokens` tokens of `dim` rotated channels."""
        expect("rotation table", self.table, torch.float32, (None, dim // 2, 2))
        expect("positions", self.positions, INTEGERS, (tokens,))
        expect("slots", self.slots, INTEGERS, (tokens,))

    def steps(self, dim: int) -> tuple[int, int]:
        """Channels from one pair to the next, and from a pair's first channel to its second."""
        return (2, 1) if self.interleaved else (1, dim // 2)


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm per head. weight: [heads + kv_heads, head_dim] of qkv's dtype, q's norms before k's."""

    weight: torch.Tensor
    eps: float


@triton.jit
def _load_pairs(row, head, ok, part, PARTS: tl.constexpr, DTYPE: tl.constexpr,
                DIM: tl.constexpr, GAP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The channels of each pair: two of [heads, BLOCK] float32. Neighbours are read side by side."""
    if GAP == 1:
        channel = tl.arange(0, 2 * BLOCK)
        inside = ok[:, None] & (channel < DIM)[None, :]
        both = load_sum(row + head[:, None] * DIM + channel[None, :], inside, part, PARTS, DTYPE)
        a, b = tl.split(tl.reshape(both, (head.shape[0], BLOCK, 2)))
    else:
        pair = tl.arange(0, BLOCK)
        inside = ok[:, None] & (pair < DIM // 2)[None, :]
        at = row + head[:, None] * DIM + pair[None, :]
        a = load_sum(at, inside, part, PARTS, DTYPE)
        b = load_sum(at + GAP, inside, part, PARTS, DTYPE)
    return a, b


@triton.jit
def _store_pairs(row, head, ok, a, b, DIM: tl.constexpr, GAP: tl.constexpr, BLOCK: tl.constexpr):
    """Stores pairs where _load_pairs() reads them. a, b: [heads, BLOCK] of the row's dtype."""
    if GAP == 1:
        channel = tl.arange(0, 2 * BLOCK)
        inside = ok[:, None] & (channel < DIM)[None, :]
        both = tl.reshape(tl.join(a, b), (head.shape[0], 2 * BLOCK))
        tl.store(row + head[:, None] * DIM + channel[None, :], both, mask=inside)
    else:
        pair = tl.arange(0, BLOCK)
        inside = ok[:, None] & (pair < DIM // 2)[None, :]
        at = row + head[:, None] * DIM + pair[None, :]
        tl.store(at, a, mask=inside)
        tl.store(at + GAP, b, mask=inside)


@triton.jit
def load_turn(table, position, pair, PAIRS: tl.constexpr):
    """cos and sin of each pair: [1, pairs]."""
    at = table + (position.to(tl.int64) * PAIRS + pair) * 2
    return (
        tl.load(at, mask=pair < PAIRS, other=0)[None, :],
        tl.load(at + 1, mask=pair < PAIRS, other=0)[None, :],
    )


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])  # of rows behind any number of others
def _store_gqa_kernel(
    qkv, q_out, k_cache, v_cache, weight, table, positions, slots, k_scale, v_scale, pitch, part, eps, clip,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, GAP: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, CLIP: tl.constexpr, FP8: tl.constexpr,
    PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # Slots, positions and weights are inputs, written long before. Nothing else is read before the wait.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    position = tl.load(positions + token, mask=slot >= 0, other=0)
    cos, sin = load_turn(table, position, tl.arange(0, BLOCK), DIM // 2)
    q_groups: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    kv_groups: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    group = tl.program_id(1)
    # For this program: q, k or v (0, 1, 2), its first head, and the number of heads of that kind.
    kind = (group >= q_groups).to(tl.int32) + (group >= q_groups + kv_groups).to(tl.int32)
    local = group - (kind > 0) * q_groups - (kind > 1) * kv_groups
    head = local * HEADS + tl.arange(0, HEADS)
    count = tl.where(kind == 0, Q_HEADS, KV_HEADS)
    before = (kind > 0) * Q_HEADS + (kind > 1) * KV_HEADS
    ok = head < count
    after_previous(EARLY)
    if slot < 0:
        return
    dtype: tl.constexpr = q_out.dtype.element_ty
    a, b = _load_pairs(qkv + token * pitch + before * DIM, head, ok, part, PARTS, dtype, DIM, GAP, BLOCK)
    if CLIP:
        a = tl.clamp(a, -clip, clip, propagate_nan=tl.PropagateNan.ALL)
        b = tl.clamp(b, -clip, clip, propagate_nan=tl.PropagateNan.ALL)
    if kind < 2:
        if NORM:
            scale = 1.0 / tl.sqrt(tl.sum(a * a + b * b, axis=1) / DIM + eps)
            w, v = _load_pairs(
                weight + before * DIM, head, ok, 0, 1, weight.dtype.element_ty, DIM, GAP, BLOCK
            )
            a, b = a * scale[:, None] * w, b * scale[:, None] * v
        a, b = a * cos - b * sin, a * sin + b * cos
    if kind == 0:
        row = q_out + token * (Q_HEADS * DIM)
        _store_pairs(row, head, ok, a.to(dtype), b.to(dtype), DIM, GAP, BLOCK)
    elif kind == 1:
        store_cache(k_cache + slot * (KV_HEADS * DIM), k_scale, head, ok, a, b, DIM, GAP, BLOCK, FP8)
    else:
        store_cache(v_cache + slot * (KV_HEADS * DIM), v_scale, head, ok, a, b, DIM, GAP, BLOCK, FP8)


@triton.jit
def store_cache(
    row, scales, head, ok, a, b,
    DIM: tl.constexpr, GAP: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Stores heads of a token's row, as codes or unchanged."""
    if FP8:
        scale = tl.load(scales + head, mask=ok, other=1.0)[:, None]
        _store_pairs(row, head, ok, to_code(a, scale), to_code(b, scale), DIM, GAP, BLOCK)
    else:
        dtype: tl.constexpr = row.dtype.element_ty
        _store_pairs(row, head, ok, a.to(dtype), b.to(dtype), DIM, GAP, BLOCK)


def store_gqa(
    qkv: torch.Tensor | Partial,
    q_out: torch.Tensor,
    kv: PagedKv,
    rotation: Rotation,
    norm: HeadNorm | None = None,
    clip: float = 0.0,
) -> None:
    """Rotates q and k, writes q to `q_out` and k and v to the cache.

    Args:
        qkv: [T, (heads + 2 * kv_heads) * head_dim]; rows may have a pitch; or its partial sums, which are
          rounded to q_out's dtype once added up. q_out: [T, heads, head_dim].
        clip: values are clamped to +-clip before norm and rotation; 0 = no clamp.
    Raises: InternalError for another shape, dtype or layout.
    """
    kv.check()
    tokens, heads, dim = q_out.shape
    kv_heads, v = kv.kv_heads, kv.layer.v
    if v is None or kv.layer.k.shape[3] != dim or v.shape[3] != dim or dim % 2:
        raise InternalError(f"cache: k and v must be of head_dim = {dim} channels, an even number")
    expect("q_out", q_out, FLOATS, (tokens, heads, dim))
    given = operand("qkv", qkv, q_out.dtype, (tokens, (heads + 2 * kv_heads) * dim))
    if norm is not None:
        expect("norm weight", norm.weight, q_out.dtype, (heads + kv_heads, dim))
    rotation.check(tokens, dim)
    _, gap = rotation.steps(dim)
    each = _MANY_HEADS if tokens > _MANY_TOKENS else BLOCK_HEADS
    groups = -(-heads // each) + 2 * -(-kv_heads // each)
    if tokens:
        _store_gqa_kernel[(tokens, groups)](
            given.rows, q_out, kv.layer.k, v, q_out if norm is None else norm.weight,
            rotation.table, rotation.positions, rotation.slots, kv.k_scale, kv.v_scale,
            given.rows.stride(0), given.step, 0.0 if norm is None else norm.eps, clip,
            Q_HEADS=heads, KV_HEADS=kv_heads, DIM=dim, GAP=gap, HEADS=each,
            BLOCK=block(dim // 2), NORM=norm is not None, CLIP=clip > 0, FP8=kv.fp8, PARTS=given.parts,
            **early(q_out, lets_next_start=True), num_warps=4,
        )  # fmt: skip


@triton.jit
def _store_mla_kernel(
    latent, k_rope, q_rope, q_out, cache, weight, table, positions, slots, k_scale,
    latent_pitch, rope_pitch, q_pitch, q_head_pitch, out_pitch, out_head_pitch, eps,
    Q_HEADS: tl.constexpr, LATENT: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr, GAP: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_LATENT: tl.constexpr, FP8: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    pair = tl.arange(0, BLOCK)
    cos, sin = load_turn(table, tl.load(positions + token), pair, DIM // 2)
    group = tl.program_id(1)
    if group > 0:
        head = (group - 1) * HEADS + tl.arange(0, HEADS)
        inside = (head < Q_HEADS)[:, None] & (pair < DIM // 2)[None, :]
        at = q_rope + token * q_pitch + head[:, None] * q_head_pitch + pair[None, :] * STEP
        a = tl.load(at, mask=inside, other=0).to(tl.float32)
        b = tl.load(at + GAP, mask=inside, other=0).to(tl.float32)
        out = q_out + token * out_pitch + head[:, None] * out_head_pitch + pair[None, :] * STEP
        tl.store(out, (a * cos - b * sin).to(q_out.dtype.element_ty), mask=inside)
        tl.store(out + GAP, (a * sin + b * cos).to(q_out.dtype.element_ty), mask=inside)
    else:
        row = cache + slot * (LATENT + DIM)
        channel = tl.arange(0, BLOCK_LATENT)
        whole = channel < LATENT
        value = tl.load(latent + token * latent_pitch + channel, mask=whole, other=0).to(tl.float32)
        w = tl.load(weight + channel, mask=whole, other=0).to(tl.float32)
        value = value * (1.0 / tl.sqrt(tl.sum(value * value, axis=0) / LATENT + eps)) * w
        k_at, k_inside = pair[None, :] * STEP, (pair < DIM // 2)[None, :]
        key = k_rope + token * rope_pitch + k_at
        c = tl.load(key, mask=k_inside, other=0).to(tl.float32)
        d = tl.load(key + GAP, mask=k_inside, other=0).to(tl.float32)
        c, d = c * cos - d * sin, c * sin + d * cos
        only = tl.zeros((1,), dtype=tl.int32)  # the one key head
        store_cache(row + LATENT, k_scale, only, only == 0, c, d, DIM, GAP, BLOCK, FP8)
        if FP8:
            tl.store(row + channel, to_code(value, tl.load(k_scale)), mask=whole)
        else:
            tl.store(row + channel, value.to(cache.dtype.element_ty), mask=whole)


@dataclass(frozen=True, slots=True)
class MlaInput:
    """Results of the down and query projections, of one dtype; rows, and heads of q, may have a pitch.

    latent: [T, kv_lora]. k_rope: [T, rope_dim]. q_rope: [T, heads, rope_dim].
    norm: [kv_lora], the latent's norm weight. eps: of that norm.
    """

    latent: torch.Tensor
    k_rope: torch.Tensor
    q_rope: torch.Tensor
    norm: torch.Tensor
    eps: float


def store_mla(x: MlaInput, q_out: torch.Tensor, kv: PagedKv, rotation: Rotation) -> None:
    """Writes the normed latent and the rotated key to the cache, and the rotated query channels to `q_out`.

    Args:
        q_out: [T, heads, rope_dim] of x's dtype, any pitches: the last channels of the query of attention.
          May be x.q_rope: a thread writes only what it has read itself.
    Raises: InternalError for another shape, dtype or layout.
    """
    kv.check()
    tokens, heads, dim = x.q_rope.shape
    latent = x.latent.shape[1]
    if kv.layer.v is not None or kv.layer.k.shape[2:] != (1, latent + dim) or dim % 2:
        raise InternalError(f"cache: must be of one head of {latent} + {dim} channels and without v")
    expect("latent", x.latent, FLOATS, (tokens, latent), pitch=True)
    expect("k_rope", x.k_rope, x.latent.dtype, (tokens, dim), pitch=True)
    expect("norm", x.norm, x.latent.dtype, (latent,))
    for name, q in (("q_rope", x.q_rope), ("q_out", q_out)):
        rows = q[0] if tokens else q.flatten(0, 1)
        expect(name, rows, x.latent.dtype, (heads if tokens else 0, dim), pitch=True)
    rotation.check(tokens, dim)
    step, gap = rotation.steps(dim)
    if tokens:
        _store_mla_kernel[(tokens, 1 + -(-heads // BLOCK_HEADS))](
            x.latent, x.k_rope, x.q_rope, q_out, kv.layer.k, x.norm,
            rotation.table, rotation.positions, rotation.slots, kv.k_scale,
            x.latent.stride(0), x.k_rope.stride(0), *x.q_rope.stride()[:2], *q_out.stride()[:2], x.eps,
            Q_HEADS=heads, LATENT=latent, DIM=dim, STEP=step, GAP=gap, HEADS=BLOCK_HEADS,
            BLOCK=block(dim // 2), BLOCK_LATENT=block(latent), FP8=kv.fp8,
            **early(q_out, lets_next_start=True), num_warps=4,
        )  # fmt: skip
