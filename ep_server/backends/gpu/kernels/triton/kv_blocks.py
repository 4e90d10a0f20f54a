"""Gathers KV blocks from the tensors of all layers into one buffer, and scatters them back.

Every part of a block is copied as it is, whatever its dtype: heads, FP8 or latent rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.launch import after_previous, early, expect

TILE = 1024  # words that a program has in flight
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit
def _copy_kernel(
    addresses, blocks, buffer,
    SIZE: tl.constexpr, GATHER: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (i, p): part p of the i-th block. SIZE: words of a part."""
    after_previous(EARLY)
    index, part = tl.program_id(0), tl.program_id(1)
    cache = tl.load(addresses + part).to(buffer.dtype) + tl.load(blocks + index) * SIZE
    staged = buffer + (index * tl.num_programs(1) + part).to(tl.int64) * SIZE
    for first in range(0, SIZE, TILE):
        at = first + tl.arange(0, TILE)
        if GATHER:
            tl.store(staged + at, tl.load(cache + at, mask=at < SIZE), mask=at < SIZE)
        else:
            tl.store(cache + at, tl.load(staged + at, mask=at < SIZE), mask=at < SIZE)


def gather_blocks(addresses: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor) -> None:
    """out[i, p] = part p of blocks[i].

    Args:
        addresses: [P] int64, of each part of the cache: contiguous, block after block.
        blocks: [N] int64. out: [at least N, P, bytes of a part] uint8.
    Raises: InternalError for another shape or dtype, as scatter_blocks() does.
    """
    _copy(addresses, blocks, out, gather=True)


def scatter_blocks(addresses: torch.Tensor, blocks: torch.Tensor, source: torch.Tensor) -> None:
    """Part p of blocks[i] = source[i, p]; arguments as of gather_blocks(). No block may be named twice."""
    _copy(addresses, blocks, source, gather=False)


def _copy(addresses: torch.Tensor, blocks: torch.Tensor, buffer: torch.Tensor, *, gather: bool) -> None:
    expect("addresses", addresses, torch.int64, (None,))
    expect("blocks", blocks, torch.int64, (None,))
    expect("buffer", buffer, torch.uint8, (None, len(addresses), None))
    expect("buffer", buffer[: len(blocks)], torch.uint8, (len(blocks), len(addresses), None))
    size = buffer.shape[2]
    word = next(width for width in WORDS if size % width == 0)
    grid = (len(blocks), len(addresses))
    _copy_kernel[grid](
        addresses,
        blocks,
        buffer.view(WORDS[word]),
        SIZE=size // word,
        GATHER=gather,
        TILE=TILE,
        **early(buffer),
    )
