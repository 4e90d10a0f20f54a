"""Programmatic dependent launch: a kernel's blocks are set up as the last ones of the kernel before it end.

A kernel that is launched so calls after_previous() before it reads what other kernels of the step write: it
waits until all that was enqueued before it has ended and its writes are seen. So the order of work is that of
the stream, and what is saved is a part of the microsecond between two kernels. Before the call it may read
weights, and what the step was given (slots, positions): kernels ahead that may still run must not write
these, so who makes them on the device for a test has it end first, and in a step embed() stands behind what
writes them and lets nothing start before it has ended. Kernels that are short, or whose successor reads
weights meanwhile, let that be set up as soon as all their own blocks are; behind the long ones waiting blocks
took more from those that work than they saved, but behind the experts' kernel
(csrc/kernels/hopper/experts), whose blocks leave one by one. Needs compute capability 9.0.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def after_previous(EARLY: tl.constexpr):
    """By every block, also one with nothing to do: the next kernel relies on it. EARLY: as early() has it."""
    if EARLY >= 2:
        gdc_launch_dependents()
    if EARLY >= 1:
        gdc_wait()


def early(tensor: torch.Tensor, *, lets_next_start: bool = False) -> dict[str, int | bool]:
    """Arguments of a launch on the device of `tensor`; one of meta stands for an H200.

    lets_next_start: at once, not as this one ends.
    """
    kind = tensor.device.type
    if kind == "meta" or (kind == "cuda" and _hopper(tensor.device.index)):
        return {"EARLY": 2 if lets_next_start else 1, "launch_pdl": True}
    return {"EARLY": 0}


@cache
def _hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] >= 9
