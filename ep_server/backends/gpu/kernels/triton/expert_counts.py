"""What a step's counts of rows by layer and expert add to the totals, in one kernel, which empties them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.checks import block, expect
from ep_server.backends.gpu.kernels.triton.early import after_previous, early

_EXPERTS = 32  # of a program


@triton.jit
def _tally_kernel(
    rows, total, active, LAYERS: tl.constexpr, EXPERTS: tl.constexpr, LAYERS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    layer, expert = tl.arange(0, LAYERS_BLOCK)[:, None], tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (layer < LAYERS) & (expert[None, :] < EXPERTS)
    at = rows + layer * EXPERTS + expert[None, :]
    came = tl.load(at, mask=inside, other=0)
    tl.store(at, tl.zeros_like(came), mask=inside)
    known = tl.load(total + expert, mask=expert < EXPERTS, other=0)
    tl.store(total + expert, known + tl.sum(came.to(tl.int64), axis=0), mask=expert < EXPERTS)
    some = tl.sum(tl.sum((came != 0).to(tl.int32), axis=0), axis=0)
    tl.atomic_add(active, some.to(tl.int64))


def tally(rows: torch.Tensor, total: torch.Tensor, active: torch.Tensor) -> None:
    """total += sums over layers, active += how many are not 0, rows = 0.

    Args:
        rows: [layers, E] int32. total: [E] int64. active: [] int64.
    Raises: InternalError for another shape, dtype or layout.
    """
    expect("rows", rows, torch.int32, (None, None))
    layers, experts = rows.shape
    expect("total", total, torch.int64, (experts,))
    expect("active", active, torch.int64, ())
    if rows.numel():
        size = min(block(experts), _EXPERTS)
        _tally_kernel[(-(-experts // size),)](
            rows, total, active, LAYERS=layers, EXPERTS=experts, LAYERS_BLOCK=block(layers), BLOCK=size,
            **early(rows), num_warps=8,
        )  # fmt: skip
