"""[6] Copies blocks of an FP8 cache to bfloat16, which holds every code exactly. Scales are left out."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.launch import (
    FP8,
    after_previous,
    block,
    early,
    expect,
    expect_range,
)
from ep_server.backends.gpu.kernels.triton.paged import PagedKv
from ep_server.errors import InternalError
from ep_server.models.kv_cache import KvLayer

_TILE = 4096  # codes of keys, and of values, that a program has in flight


@triton.jit(do_not_specialize_on_alignment=["blocks", "count"])
def _widen_kernel(
    k, v, wide_k, wide_v, blocks, count,
    SIZE: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Any number of programs share the blocks. SIZE: codes of a block of keys, and of values."""
    after_previous(EARLY)
    parts: tl.constexpr = (SIZE + TILE - 1) // TILE
    for item in range(tl.program_id(0), tl.load(count) * parts, tl.num_programs(0)):
        at = item % parts * TILE + tl.arange(0, TILE)
        inside = at < SIZE
        index = item // parts
        source, to = tl.load(blocks + index).to(tl.int64) * SIZE + at, index * SIZE + at
        keys, values = tl.load(k + source, mask=inside), tl.load(v + source, mask=inside)
        tl.store(wide_k + to, keys.to(tl.bfloat16), mask=inside)
        tl.store(wide_v + to, values.to(tl.bfloat16), mask=inside)


def widen_blocks(
    kv: PagedKv, blocks: torch.Tensor, count: torch.Tensor, wide: KvLayer, programs: int
) -> None:
    """wide.k[i], wide.v[i] = the codes of block blocks[i] of kv as numbers, for i < count[0].

    Args:
        kv: FP8, with values of as many channels as keys. blocks: [N] int32; count: [1] int32, at most N.
        wide: N blocks of the same shape, bfloat16, of fewer than 2^31 numbers each. programs: to launch.
    Raises: InternalError for another shape, dtype or layout.
    """
    k, v = kv.layer.k, kv.layer.v
    if v is None:
        raise InternalError("widened blocks: the cache has no v")
    assert wide.v is not None
    for name, each in (("cache k", k), ("cache v", v)):
        expect(name, each, FP8, tuple(k.shape))
    expect("blocks", blocks, torch.int32, (None,))
    expect("count", count, torch.int32, (1,))
    for name, each in (("wide k", wide.k), ("wide v", wide.v)):
        expect(name, each, torch.bfloat16, (len(blocks), *k.shape[1:]))
    expect_range("numbers of a copy", wide.k.numel(), 0, (1 << 31) - 1)
    size = k.shape[1] * k.shape[2] * k.shape[3]
    _widen_kernel[(programs,)](
        k, v, wide.k, wide.v, blocks, count, SIZE=size, TILE=min(block(size), _TILE), **early(k), num_warps=4
    )
