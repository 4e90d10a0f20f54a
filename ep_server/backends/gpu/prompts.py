"""Prompts that are run before a rank is ready, for the kernels that they need. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass

from ep_server.backends.gpu.step_input import InputShape
from ep_server.records import SeqSlice, StepBatch


@dataclass(frozen=True, slots=True)
class PromptRoom:
    """shape: of the largest step. blocks: of the cache. max_context: longest sequence, tokens."""

    shape: InputShape
    blocks: int
    max_context: int


def prompts_of(rows: int, room: PromptRoom) -> StepBatch:
    """Prompts of so many rows together, none longer than a sequence may be, or as many as there is room for.

    The first blocks of the cache are taken.
    """
    shape, pieces = room.shape, list[SeqSlice]()
    held, left = min(shape.blocks, room.blocks), rows  # blocks of a sequence, rows that are still to come
    while left > 0 and len(pieces) < shape.sequences:
        first = len(pieces) * held
        own = range(first, min(first + held, room.blocks))
        count = min(left, len(own) * shape.block_size, room.max_context)
        if count == 0:
            break
        used = tuple(own[: -(-count // shape.block_size)])
        pieces.append(SeqSlice(len(pieces), 0, (0,) * count, used, sample=False))
        left -= count
    return StepBatch(tuple(pieces), rows - left)
