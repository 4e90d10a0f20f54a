"""`Compute` by our own CPU kernels (csrc/kernels/cpu), with weights packed once at load.

A row's result depends on the row only: not on its batch, its place in it, or the number of threads. Dtypes,
shapes and contiguity are checked here, because the kernels see only addresses. Packed weights lie in huge
pages where the system grants them: a decode step reads most of them and would miss the TLB on every page.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ep_server import _C
from ep_server.errors import InternalError
from ep_server.models.batch import AttentionMeta
from ep_server.models.compute import FfnScales, FfnTensors
from ep_server.models.kv_cache import KvLayer

_HUGE_PAGE = 2 << 20
_DTYPES = (torch.float32, torch.bfloat16)


class NativeCompute:
    """See `compute.Compute`.

    Args:
        threads: compute threads, the caller included. isa: one of `_C.compute_isas()`, or "auto".
    """

    def __init__(self, threads: int = 1, isa: str = "auto") -> None:
        self._kernels, self.fp8 = _C.Compute(threads=threads, isa=isa), False
        self.device = torch.device("cpu")

    def __repr__(self) -> str:
        return f"NativeCompute(threads={self._kernels.threads}, isa={self._kernels.isa!r})"

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> NativeLinear:
        """Packs the matrix."""
        n, k = weight.shape
        _check("weight", weight, (n, k), weight.dtype)
        if bias is not None:
            _check("bias", bias, (n,), weight.dtype)
        bf16 = weight.dtype is torch.bfloat16
        words = _huge(_C.packed_linear_words(bf16, n, k))
        _C.pack_linear(bf16, weight.data_ptr(), n, k, words.data_ptr())
        return NativeLinear(self._kernels, words, bias, n, k, weight.dtype)

    def head_linear(self, weight: torch.Tensor) -> NativeHeadLinear:
        """Packs the matrices."""
        heads, k, n = weight.shape
        _check("weight", weight, (heads, k, n), weight.dtype)
        bf16 = weight.dtype is torch.bfloat16
        size = _C.packed_linear_words(bf16, n, k)
        words = _huge(heads * size)
        for head in range(heads):
            matrix = weight[head].t().contiguous()
            _C.pack_linear(bf16, matrix.data_ptr(), n, k, words[head * size :].data_ptr())
        return NativeHeadLinear(self._kernels, words, heads, n, k, weight.dtype)

    def gated_ffn(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        scales: FfnScales | None = None,
        *,
        held: Sequence[int] | None = None,
    ) -> NativeGatedFfn:
        """Packs the matrices, which are no FP8 codes. Raises: InternalError.

        Memory of FFNs that are not `held` stays untouched.
        """
        experts, hidden, ffn = down.shape
        _check_ffns(gate_up, down)
        bf16 = down.dtype is torch.bfloat16
        up_words, down_words = (
            _C.packed_gated_words(bf16, ffn, hidden),
            _C.packed_linear_words(bf16, hidden, ffn),
        )
        words = _huge(experts * (up_words + down_words))
        packed_up = words[: experts * up_words].view(experts, up_words)
        packed_down = words[experts * up_words :].view(experts, down_words)
        made = NativeGatedFfn(self._kernels, packed_up, packed_down, hidden, ffn, down.dtype)
        for e in range(experts) if held is None else held:
            made.put(e, (gate_up[e : e + 1], down[e : e + 1], None))
        return made

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `compute.Compute`."""
        groups, dim = (1, weight.shape[0]) if weight.dim() == 1 else weight.shape
        whole = x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == dim)
        if x.shape[1:] != weight.shape or weight.dtype is not x.dtype or not whole:
            raise InternalError(f"x: {_describe(x)}, expected whole rows of the weight's {_describe(weight)}")
        _check("weight", weight, weight.shape, x.dtype)
        out = torch.empty(x.shape, dtype=x.dtype)
        self._kernels.norm(
            x.dtype is torch.bfloat16,
            x.data_ptr(),
            len(x),
            x.stride(0),
            groups,
            dim,
            weight.data_ptr(),
            eps,
            out.data_ptr(),
        )
        return out

    def attend(self, meta: AttentionMeta, window: int, dtype: torch.dtype) -> NativeAttend:
        """Finds each row's sequence."""
        count, starts = len(meta.context), meta.query_start
        sequence = torch.arange(count)
        if count != meta.num_decode:
            lengths = torch.tensor(starts[1:]) - torch.tensor(starts[:-1])
            sequence = torch.repeat_interleave(sequence, lengths)
        return NativeAttend(self._kernels, meta, sequence, window)


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """words: [..] int32, the packed matrix [n, k]. bias: [n] of `dtype`."""

    kernels: _C.Compute
    words: torch.Tensor
    bias: torch.Tensor | None
    n: int
    k: int
    dtype: torch.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `compute.Linear`."""
        return self._multiply(x, self.dtype)

    def unrounded(self, x: torch.Tensor) -> torch.Tensor:
        """See `compute.Linear`."""
        return self._multiply(x, torch.float32)

    def _multiply(self, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        rows = len(x)
        if x.dtype is not self.dtype or x.shape[1] != self.k or x.stride(1) != 1:
            raise InternalError(f"x: {_describe(x)}, expected {self.dtype} [T, {self.k}] with whole rows")
        out = torch.empty(rows, self.n, dtype=out_dtype)
        self.kernels.linear(
            self.dtype is torch.bfloat16,
            x.data_ptr(),
            rows,
            x.stride(0),
            0,
            self.words.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(),
            1,
            self.n,
            self.k,
            out.data_ptr(),
            self.n,
            0,
            out_dtype is torch.float32,
        )
        return out


@dataclass(frozen=True, slots=True)
class NativeHeadLinear:
    """words: [..] int32, the packed matrices, each [n, k]."""

    kernels: _C.Compute
    words: torch.Tensor
    heads: int
    n: int
    k: int
    dtype: torch.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `compute.HeadLinear`."""
        if x.dtype is not self.dtype or x.shape[1:] != (self.heads, self.k) or x.stride(2) != 1:
            expected = f"{self.dtype} [T, {self.heads}, {self.k}] with whole rows"
            raise InternalError(f"x: {_describe(x)}, expected {expected}")
        out = torch.empty(len(x), self.heads, self.n, dtype=self.dtype)
        self.kernels.linear(
            self.dtype is torch.bfloat16,
            x.data_ptr(),
            len(x),
            x.stride(0),
            x.stride(1),
            self.words.data_ptr(),
            0,
            self.heads,
            self.n,
            self.k,
            out.data_ptr(),
            out.stride(0),
            out.stride(1),
            self.dtype is torch.float32,
        )
        return out


@dataclass(frozen=True, slots=True)
class NativeGatedFfn:
    """gate_up, down: [E, ..] int32, packed."""

    kernels: _C.Compute
    gate_up: torch.Tensor
    down: torch.Tensor
    hidden: int
    ffn: int
    dtype: torch.dtype

    def __call__(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """See `compute.GatedFfn`. offsets must start with 0, ascend and end with N."""
        experts = len(self.down)
        _check("rows", rows, (len(rows), self.hidden), self.dtype)
        _check("offsets", offsets, (experts + 1,), torch.int64)
        out = torch.empty_like(rows)
        self.kernels.expert_ffn(
            self.dtype is torch.bfloat16,
            rows.data_ptr(),
            len(rows),
            offsets.data_ptr(),
            experts,
            self.hidden,
            self.ffn,
            self.gate_up.data_ptr(),
            self.down.data_ptr(),
            out.data_ptr(),
        )
        return out

    def room(self, index: int) -> FfnTensors:
        """New memory: values are packed from it. See `compute.GatedFfn`."""
        gate_up = torch.empty(1, 2 * self.ffn, self.hidden, dtype=self.dtype)
        return gate_up, torch.empty(1, self.hidden, self.ffn, dtype=self.dtype), None

    def put(self, index: int, values: FfnTensors) -> None:
        """Packs one FFN. See `compute.GatedFfn`."""
        gate_up, down, _ = values
        _check_ffns(gate_up, down)
        _check("down", down, (1, self.hidden, self.ffn), self.dtype)
        bf16, words = self.dtype is torch.bfloat16, (self.gate_up[index], self.down[index])
        _C.pack_gated(bf16, gate_up.data_ptr(), self.ffn, self.hidden, words[0].data_ptr())
        _C.pack_linear(bf16, down.data_ptr(), self.hidden, self.ffn, words[1].data_ptr())


@dataclass(frozen=True, slots=True)
class NativeAttend:
    """sequence: [T] int64, the sequence of each row."""

    kernels: _C.Compute
    meta: AttentionMeta
    sequence: torch.Tensor
    window: int

    def __call__(self, q: torch.Tensor, kv: KvLayer, scale: float) -> torch.Tensor:
        """See `compute.Attend`."""
        rows, heads, k_dim = q.shape
        meta, kv_heads = self.meta, kv.k.shape[2]
        if rows != len(self.sequence) or q.stride(2) != 1 or q.stride(1) != k_dim or heads % kv_heads:
            raise InternalError(
                f"q: {_describe(q)}, expected [{len(self.sequence)}, heads, k_dim], whole rows"
            )
        _check("k", kv.k, (len(kv.k), meta.block_size, kv_heads, k_dim), q.dtype)
        if kv.v is not None:
            _check("v", kv.v, (*kv.k.shape[:3], kv.v_dim), q.dtype)
        out = q.new_empty(rows, heads, kv.v_dim)
        self.kernels.attention(
            q.dtype is torch.bfloat16,
            q.data_ptr(),
            rows,
            q.stride(0),
            heads,
            kv_heads,
            k_dim,
            kv.v_dim,
            kv.k.data_ptr(),
            0 if kv.v is None else kv.v.data_ptr(),
            meta.blocks.data_ptr(),
            meta.blocks.stride(0),
            meta.block_size,
            self.sequence.data_ptr(),
            meta.positions.data_ptr(),
            self.window,
            scale,
            out.data_ptr(),
        )
        return out


def _check_ffns(gate_up: torch.Tensor, down: torch.Tensor) -> None:
    experts, hidden, ffn = down.shape
    _check("gate_up", gate_up, (experts, 2 * ffn, hidden), gate_up.dtype)
    _check("down", down, (experts, hidden, ffn), gate_up.dtype)


def _huge(words: int) -> torch.Tensor:
    """[words] int32 of zeros in memory of its own, in huge pages if the system has them."""
    size = -(-max(4 * words, 1) // _HUGE_PAGE) * _HUGE_PAGE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if 4 * words >= _HUGE_PAGE:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return (
        torch.frombuffer(memory, dtype=torch.int32, count=words)
        if words
        else torch.empty(0, dtype=torch.int32)
    )


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype is not dtype or not tensor.is_contiguous():
        raise InternalError(f"{name}: {_describe(tensor)}, expected contiguous {dtype} {list(shape)}")


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
