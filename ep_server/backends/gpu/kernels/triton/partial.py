"""A product as partial sums. The kernel that reads it adds them in order, which saves a pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.launch import expect

MOST_PARTS = 32


@dataclass(frozen=True, slots=True)
class Partial:
    """sums: [P, T, N] float32, contiguous: sums over parts of the channels of a product [T, N]."""

    sums: torch.Tensor


@dataclass(frozen=True, slots=True)
class Operand:
    """The kernel's arguments: the first part's rows; `parts` parts, `step` elements apart."""

    rows: torch.Tensor
    parts: int
    step: int


def operand(
    name: str,
    given: torch.Tensor | Partial,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    shape: tuple[int | None, int],
) -> Operand:
    """A product [T, N] of `dtype`, rows with a pitch, or its partial sums.

    Raises: InternalError for another shape, dtype or layout.
    """
    if isinstance(given, torch.Tensor):
        expect(name, given, dtype, shape, pitch=True)
        return Operand(given, 1, 0)
    expect(name, given.sums, torch.float32, (None, *shape))
    return Operand(given.sums[0], len(given.sums), given.sums.stride(0))


@triton.jit
def load_sum(at, inside, step, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """The sum of the parts as float32, after rounding once to DTYPE; zeros outside."""
    value = tl.load(at, mask=inside, other=0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(at + part * step, mask=inside, other=0)
    if at.dtype.element_ty != DTYPE:
        value = value.to(DTYPE).to(tl.float32)
    return value
