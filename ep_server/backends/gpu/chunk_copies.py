"""Which blocks of the cache a step's prompt chunks attend to as a copy.

The Hopper kernel for chunks reads keys and values of each head in bfloat16. So it attends to a copy of an FP8
cache (widening.py), or of the keys and values that latents expand to (expansion.py), made by one kernel per
layer ahead of it. The host chooses for each step; all layers use the same scratch memory. Units: blocks,
tokens, bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ep_server.backends.gpu.kernels.triton.step_words import Packed, room_for, spread

MIX = np.int64(0x5851F42D4C957F2D)  # odd; products of 64 bits wrap
MOST_BYTES = 512 << 20  # of scratch memory
# FLOP per second on a full GPU, measured with bfloat16 caches (docs/design-notes/2026-11-hopper-prefill.md).
HOPPER_FLOPS = 600e12
HOPPER_ROWS, HOPPER_PARTS = 128, 16  # of a tile; parts of its context
LAUNCH_SECONDS = 4e-6  # assumed, not measured


class CopyRule(Protocol):
    """When chunks attend to a copy, and how much of the cache one holds."""

    @property
    def block_size(self) -> int:
        """Tokens of a block of the cache."""
        ...

    @property
    def together(self) -> int:
        """Blocks of the cache that make a block of the copy."""
        ...

    @property
    def blocks(self) -> int:
        """Of the copy, at most."""
        ...

    @property
    def nbytes(self) -> int:
        """Of the scratch memory."""
        ...

    def pays(self, tokens: np.ndarray, contexts: np.ndarray, blocks: int) -> bool:
        """Whether copy and Hopper kernel take less time than Triton's kernel.

        Args:
            tokens, contexts: [N] of each chunk; a context includes the chunk. blocks: of the copy.
        """
        ...


def tiles_seconds(work: float, full: float, flops: float) -> float:
    """Of so many FLOP. full: programs for each multiprocessor; flops: the rate where there is one or more."""
    return work / (flops * min(1.0, full)) if work else 0.0


@dataclass(frozen=True, slots=True)
class CopiedBlocks:
    """A step's copy, on the device; int32.

    blocks: [B] of the cache, in the order of the copy; count: [1] blocks of the copy.
    tables: [S, W] of each sequence with a chunk, of blocks of the copy; other rows hold anything.
    """

    blocks: torch.Tensor
    count: torch.Tensor
    tables: torch.Tensor


class CopiedBlocksInput:
    """The memory of the steps' CopiedBlocks, at fixed addresses. One thread fills it.

    Args:
        sequences: most of a step. width: blocks of the cache, of the longest context.
        staging: host buffers used in turn, as of StepInput.
    """

    def __init__(
        self, rule: CopyRule, sequences: int, width: int, device: torch.device, staging: int
    ) -> None:
        self._rule, width, named = rule, -(-width // rule.together), 1 + rule.blocks * rule.together
        words, pinned = room_for(named + sequences * width), device.type == "cuda"
        self._host = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(staging)]
        self._words = torch.zeros(1, named, dtype=torch.int32, device=device)
        self._tables = torch.zeros(sequences, width, dtype=torch.int32, device=device)
        self._fills = 0

    def view(self, sequences: int) -> CopiedBlocks:
        """Of the step filled last, or of later ones."""
        return CopiedBlocks(self._words[0, 1:], self._words[0, :1], self._tables[:sequences])

    def fill(
        self, tables: np.ndarray, tokens: np.ndarray, contexts: np.ndarray, first: int, copy: bool | None
    ) -> bool:
        """Sends a step's blocks to the device if its chunks use a copy. Returns: whether they do.

        Args:
            tables: [N, W] block tables of the chunks; tokens, contexts: [N], see CopyRule.pays().
            first: number of the first one among the sequences.
            copy: whether to, if the blocks fit; None = if it pays.
        """
        rule = self._rule
        held = -(-contexts // rule.block_size)
        if copy is False or not 0 < held.max(initial=0) <= rule.blocks * rule.together:
            return False
        blocks, copied = distinct_blocks(tables, held, rule.together)
        count = len(blocks) // rule.together
        if count > rule.blocks or not (copy or rule.pays(tokens, contexts, count)):
            return False
        host = self._host[self._fills % len(self._host)]
        self._fills += 1
        words, named = host.numpy(), 1 + len(blocks)
        end = named + copied.size
        words[0], words[1:named], words[named:end] = count, blocks, copied.reshape(-1)
        packed = Packed(host[: room_for(end)], named, *copied.shape)
        spread(packed, self._words, self._tables[first:])
        return True


def distinct_blocks(tables: np.ndarray, held: np.ndarray, together: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """The blocks that the tables name, each run of `together` of them once, and tables of their places.

    Args:
        tables: [N, W]. held: [N] entries that count, each.
    Returns: [B * together], and [N, most runs held]. A run that a table ends in is filled up with block 0;
        places of no run are 0.
    """
    runs = -(-held // together)
    whole = np.zeros((len(tables), int(runs.max(initial=0)) * together), dtype=np.int32)
    some = tables[:, : whole.shape[1]]
    np.copyto(whole[:, : some.shape[1]], some, where=np.arange(some.shape[1]) < held[:, None])
    inside = np.arange(whole.shape[1] // together) < runs[:, None]
    places = np.zeros(inside.shape, dtype=np.int32)
    named = whole.reshape(*inside.shape, together)[inside]
    if len(held) == 1:  # a sequence has each block once
        places[0] = np.arange(len(named))
        return named.reshape(-1), places
    # Numbers are compared ten times as fast as runs. Runs that differ hardly ever have the same number.
    numbers = named.astype(np.int64) @ np.power(MIX, np.arange(together))
    _, first, index = np.unique(numbers, return_index=True, return_inverse=True)
    if not np.array_equal(named[first[index]], named):
        _, first, index = np.unique(named, axis=0, return_index=True, return_inverse=True)
    places[inside] = index.reshape(-1)
    return named[first].reshape(-1), places
