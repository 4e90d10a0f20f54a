"""Counts the layers of a step in memory that the host reads while the step runs, also in a graph."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.launch import expect


@triton.jit
def _count_kernel(count, shown):
    value = tl.load(count) + 1
    tl.store(count, value)
    tl.store(shown, value, cache_modifier=".wt")


def count_layer(count: torch.Tensor, shown: torch.Tensor) -> None:
    """Adds 1 to `count` and shows it, once all earlier work of the stream has ended: not set up early.

    Args:
        count: [1] int64. shown: the same in pinned host memory.
    Raises: InternalError for another shape or dtype.
    """
    for name, tensor in (("count", count), ("shown", shown)):
        expect(name, tensor, torch.int64, (1,))
    _count_kernel[(1,)](count, shown, num_warps=1)
