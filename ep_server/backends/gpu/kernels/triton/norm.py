"""RMS norm of rows, and the sum of a residual stream fused with it. T tokens; all arithmetic is float32.

    rms_norm      out = x / sqrt(mean(x^2) + eps) * weight, rounded once to x's dtype
    add_rms_norm  residual = round(residual + x); out = rms_norm(residual); x may be the sum of two branches

One program per (token, head). A row is one tile, so `dim` is bounded by MAX_DIM; channels past it are
masked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.launch import (
    FLOATS,
    after_previous,
    block,
    early,
    expect,
    expect_range,
)
from ep_server.backends.gpu.kernels.triton.partial import Partial, load_sum, operand

MAX_DIM = 32768


@triton.jit
def load_wide(at, inside):
    """Loads as float32; zeros outside."""
    return tl.load(at, mask=inside, other=0).to(tl.float32)


@triton.jit
def store_stream(stream, value, inside):
    """Returns the stored values, because the norm uses what later layers will read."""
    rounded = value.to(stream.dtype.element_ty)
    tl.store(stream, rounded, mask=inside)
    return rounded.to(tl.float32)


@triton.jit
def store_normed(out, value, weight, inside, eps, DIM: tl.constexpr):
    """weight: already loaded, because loads do not overtake the store of a stream."""
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / DIM + eps)
    tl.store(out, (value * scale * weight).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_kernel(
    x, more, residual, weight, out, x_pitch, x_step, out_pitch, eps,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, BLOCK)
    inside = channel < DIM
    at = head * DIM + channel
    w = load_wide(weight + at, inside)
    after_previous(EARLY)
    value = load_sum(x + row * x_pitch + at, inside, x_step, PARTS, out.dtype.element_ty)
    if more is not None:
        value += load_wide(more + row * DIM + at, inside)
        value = value.to(out.dtype.element_ty).to(tl.float32)
    if ADD:
        stream = residual + row * DIM + at
        value = store_stream(stream, value + load_wide(stream, inside), inside)
    store_normed(out + row * out_pitch + at, value, w, inside, eps, DIM)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """Norms rows.

    Args:
        x: [T, dim], or [T, heads, dim] with a weight per head; rows may have a pitch, heads may not.
        weight: [dim] or [heads, dim], of x's dtype.
        out: of x's shape and dtype, rows with a pitch of their own; may be x.
    Raises: InternalError for another shape, dtype or layout.
    """
    heads, dim = (1, *weight.shape)[-2:]
    expect_range("dim", dim, 1, MAX_DIM)
    expect("x", x, FLOATS, (None, *weight.shape), pitch=True)
    expect("out", out, x.dtype, tuple(x.shape), pitch=True)
    expect("weight", weight, x.dtype, tuple(weight.shape))
    if x.numel():
        size = block(dim)
        _rms_norm_kernel[(len(x), heads)](
            x, None, x, weight, out, x.stride(0), 0, out.stride(0), eps,
            DIM=dim, BLOCK=size, ADD=False, PARTS=1,
            **early(x, lets_next_start=True), num_warps=warps_for(size),
        )  # fmt: skip


def add_rms_norm(
    x: torch.Tensor | Partial,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    more: torch.Tensor | None = None,
) -> None:
    """Adds a branch to the residual stream and norms the sum.

    Args:
        x: [T, dim], the branch; rows may have a pitch; or its partial sums, which are rounded once added up.
        residual: [T, dim], contiguous; becomes the sum.
        weight: [dim]. out: [T, dim], may be x. All of one dtype, but for partial sums.
        more: [T, dim], contiguous; added to x first, and the sum is rounded.
    Raises: InternalError for another shape, dtype or layout.
    """
    tokens, dim = residual.shape
    expect_range("dim", dim, 1, MAX_DIM)
    expect("residual", residual, FLOATS, (tokens, weight.shape[-1]))
    branch = operand("x", x, residual.dtype, (tokens, dim))
    expect("out", out, residual.dtype, (tokens, dim), pitch=True)
    expect("weight", weight, residual.dtype, (dim,))
    if more is not None:
        expect("more", more, residual.dtype, (tokens, dim))
    if residual.numel():
        size = block(dim)
        _rms_norm_kernel[(tokens, 1)](
            branch.rows, more, residual, weight, out, branch.rows.stride(0), branch.step, out.stride(0), eps,
            DIM=dim, BLOCK=size, ADD=True, PARTS=branch.parts,
            **early(out, lets_next_start=True),
            num_warps=warps_for(size if branch.parts == 1 else 2 * size),  # more loads at a time
        )  # fmt: skip


def warps_for(size: int) -> int:
    """Warps for eight elements per thread, or as close as possible."""
    return min(max(size // 256, 1), 16)
