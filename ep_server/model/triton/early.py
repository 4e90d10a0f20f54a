"""Programmatic dependent launch: a kernel's blocks are set up while the kernel before it still runs.

Every kernel that is launched so begins with after_previous(): it lets its own successor be set up, and waits
until all that was enqueued before it has ended and its writes are seen. So the order of work is that of the
stream, and only the microsecond between two kernels is saved. Needs compute capability 9.0.
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
        gdc_launch_dependents()
        gdc_wait()


def early(tensor: torch.Tensor) -> dict[str, bool]:
    """Arguments of a launch on the device of `tensor`; one of meta stands for an H200."""
    kind = tensor.device.type
    if kind == "meta" or (kind == "cuda" and _hopper(tensor.device.index)):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@cache
def _hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] >= 9
