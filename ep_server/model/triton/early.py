"""Programmatic dependent launch: a kernel's blocks are set up as the last ones of the kernel before it end.

Every kernel that is launched so begins with after_previous(): it waits until all that was enqueued before it
has ended and its writes are seen. So the order of work is that of the stream, and only a part of the
microsecond between two kernels is saved. No kernel lets its successor be set up earlier than that, blocks
that wait took more from those that work than they saved, but for the kernels for Hopper of csrc, which read
weights meanwhile. Needs compute capability 9.0.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def after_previous(EARLY: tl.constexpr):
    """The first thing that a kernel does."""
    if EARLY:
        gdc_wait()


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """Before after_previous() in a small kernel whose successor reads weights ahead, and little else."""
    if EARLY:
        gdc_launch_dependents()


def early(tensor: torch.Tensor) -> dict[str, bool]:
    """Arguments of a launch on the device of `tensor`; one of meta stands for an H200."""
    kind = tensor.device.type
    if kind == "meta" or (kind == "cuda" and _hopper(tensor.device.index)):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@cache
def _hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] >= 9
