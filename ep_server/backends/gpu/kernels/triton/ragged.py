"""Which part of a ragged list a tile belongs to, decided on the device: no host knows the parts' sizes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_counts(rows, STEP: tl.constexpr):
    """rows: [parts] rows of each part, 0 past the last one. Returns the tiles of STEP rows of each."""
    return ((rows + STEP - 1) // STEP).to(tl.int32)


@triton.jit
def find_tile(tiles, tile):
    """The part that the tile-th tile belongs to, and the tile's number inside it. tiles: of tile_counts.

    The tile must be one of them; a caller that has too many compares with the sum of `tiles` first.
    """
    before = tl.cumsum(tiles, axis=0) <= tile
    return tl.sum(before.to(tl.int32), axis=0), tile - tl.sum(tl.where(before, tiles, 0), axis=0)
