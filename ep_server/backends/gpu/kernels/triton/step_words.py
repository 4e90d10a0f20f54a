"""Copies the inputs that the host packed for a step to their device addresses, in one kernel.

The words are in pinned memory, which the GPU reads over its bus. So only this kernel runs between two steps,
and it starts to read before the previous step has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.launch import after_previous, early, expect
from ep_server.errors import InternalError

WORDS = 1024  # per program


@dataclass(frozen=True, slots=True)
class Packed:
    """words: [room_for(C * rows + count * width)] int32, on the host, pinned.

    Columns of `rows` words follow each other, then `count` tables of `width` words. The rest is not used.
    rows: 1 or more.
    """

    words: torch.Tensor
    rows: int
    count: int
    width: int


# These differ from step to step.
@triton.jit(do_not_specialize=["rows", "width", "size"], do_not_specialize_on_alignment=["tables"])
def _spread_kernel(
    words, columns, tables, rows, width, size, pitch, tables_pitch,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + at)  # without a mask, so that a thread loads its words at once
    after_previous(EARLY)
    entry = at - COLUMNS * rows
    tl.store(columns + at // rows * pitch + at % rows, word, mask=entry < 0)
    place = entry // width * tables_pitch + entry % width
    tl.store(tables + place, word, mask=(entry >= 0) & (at < size))


def room_for(size: int) -> int:
    """The words to allocate for so many, so that spread() can read without a mask."""
    return -(-size // WORDS) * WORDS


def spread(packed: Packed, columns: torch.Tensor, tables: torch.Tensor) -> None:
    """Fills the first `rows` of every column, and the first `width` entries of the first `count` tables.

    Args:
        packed: the host must not change it until the stream has passed this.
        columns: [C, ..], tables: [.., ..], int32, contiguous.
    Raises: InternalError for another shape, dtype or layout, or more than there is room for.
    """
    expect("columns", columns, torch.int32, (None, None))
    expect("tables", tables, torch.int32, (None, None))
    room = (columns.shape[1], *tables.shape)
    rows, count, width = given = (packed.rows, packed.count, packed.width)
    if rows < 1 or any(size > most for size, most in zip(given, room, strict=True)):
        raise InternalError(f"rows, tables, blocks = {given}: must be at least 1, 0, 0 and at most {room}")
    size = len(columns) * rows + count * width
    expect("words", packed.words, torch.int32, (room_for(size),))
    _spread_kernel[(room_for(size) // WORDS,)](
        packed.words, columns, tables, rows, max(width, 1), size, columns.stride(0), tables.stride(0),
        COLUMNS=len(columns), BLOCK=WORDS, **early(columns), num_warps=8,
    )  # fmt: skip
