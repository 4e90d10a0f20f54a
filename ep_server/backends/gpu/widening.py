"""Which blocks of the cache a step's prompt chunks need as a copy, and whether copying FP8 blocks pays.

The Hopper kernel for chunks reads keys and values of each head in bfloat16. Tensor cores have no product of
bfloat16 and FP8 values, so it attends to an FP8 cache by a copy in bfloat16, made by one kernel per layer
ahead of it. Triton's kernel widens what it loads, at a third of the rate. Latents are copied as the keys and
values that they expand to: expansion.py has their rule. The host chooses for each step; all layers use the same scratch memory. Units:
blocks, tokens, bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from ep_server.backends.gpu.kernels.triton.step_words import Packed, room_for, spread
from ep_server.models.families.spec import GqaSpec

MIX = np.int64(0x5851F42D4C957F2D)  # odd; products of 64 bits wrap
MOST_BYTES = 512 << 20  # of scratch memory
# FLOP per second on a full GPU, measured with bfloat16 caches (docs/design-notes/2026-11-hopper-prefill.md).
TRITON_FLOPS, HOPPER_FLOPS = 280e12, 600e12
TRITON_ROWS, HOPPER_ROWS, HOPPER_PARTS = 64, 128, 16  # of a tile; parts of its context
# Assumed for the copy, not measured: bytes per second, read and written, and what a launch takes.
COPY_BYTES, LAUNCH_SECONDS = 2e12, 4e-6


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


@dataclass(frozen=True, slots=True)
class Widening:
    """When to widen an FP8 cache. blocks: that fit into the scratch memory. num_sms: multiprocessors."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    blocks: int
    num_sms: int

    @staticmethod
    def of(spec: GqaSpec, block_size: int, wanted: int, num_sms: int) -> Widening:
        """Room for `wanted` blocks, or for as many as MOST_BYTES hold."""
        rule = Widening(spec.heads, spec.kv_heads, spec.head_dim, block_size, wanted, num_sms)
        return replace(rule, blocks=min(wanted, MOST_BYTES // rule.block_bytes))

    @property
    def together(self) -> int:
        """See CopyRule."""
        return 1

    @property
    def block_bytes(self) -> int:
        """Of the keys and values of a widened block."""
        return self.block_size * self.kv_heads * self.head_dim * 2 * 2

    @property
    def nbytes(self) -> int:
        """Of the scratch memory."""
        return self.blocks * self.block_bytes

    def pays(self, tokens: np.ndarray, contexts: np.ndarray, blocks: int) -> bool:
        """Whether copy and Hopper kernel take less time than Triton's kernel, by the rates above.

        On a full GPU that means at least 263 FLOP of attention for each byte copied: 50 new tokens behind a
        long context, where 8 query heads share a KV head. Triton's kernel does not cut contexts, so with few
        tiles of rows most multiprocessors are idle, and fewer tokens are enough. Arguments: see CopyRule.
        """
        moved = blocks * self.block_bytes * 1.5  # a code is half of what it becomes
        copied = LAUNCH_SECONDS + moved / COPY_BYTES
        hopper = self._seconds(tokens, contexts, HOPPER_ROWS, HOPPER_PARTS, HOPPER_FLOPS)
        return copied + hopper < self._seconds(tokens, contexts, TRITON_ROWS, 1, TRITON_FLOPS)

    def _seconds(
        self, tokens: np.ndarray, contexts: np.ndarray, rows: int, parts: int, flops: float
    ) -> float:
        """Of attention in tiles of so many rows, each padded, whose contexts are cut into parts."""
        tiles = -(-tokens * (self.heads // self.kv_heads) // rows) * self.kv_heads
        work = float((tiles * (contexts - tokens / 2)).sum()) * rows * self.head_dim * 4
        return tiles_seconds(work, int(tiles.sum()) * parts / max(self.num_sms, 1), flops)


def tiles_seconds(work: float, full: float, flops: float) -> float:
    """Of so many FLOP. full: programs for each multiprocessor; flops: the rate where there is one or more."""
    return work / (flops * min(1.0, full)) if work else 0.0


@dataclass(frozen=True, slots=True)
class WidenedBlocks:
    """A step's copy, on the device; int32.

    blocks: [B] of the cache, in the order of the copy; count: [1] blocks of the copy.
    tables: [S, W] of each sequence with a chunk, of blocks of the copy; other rows hold anything.
    """

    blocks: torch.Tensor
    count: torch.Tensor
    tables: torch.Tensor


class WideningInput:
    """The memory of the steps' WidenedBlocks, at fixed addresses. One thread fills it.

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

    def view(self, sequences: int) -> WidenedBlocks:
        """Of the step filled last, or of later ones."""
        return WidenedBlocks(self._words[0, 1:], self._words[0, :1], self._tables[:sequences])

    def fill(
        self, tables: np.ndarray, tokens: np.ndarray, contexts: np.ndarray, first: int, widen: bool | None
    ) -> bool:
        """Sends a step's blocks to the device if its chunks use a copy. Returns: whether they do.

        Args:
            tables: [N, W] block tables of the chunks; tokens, contexts: [N], see CopyRule.pays().
            first: number of the first one among the sequences.
            widen: whether to, if the blocks fit; None = if it pays.
        """
        rule = self._rule
        held = -(-contexts // rule.block_size)
        if widen is False or not 0 < held.max(initial=0) <= rule.blocks * rule.together:
            return False
        blocks, copied = distinct_blocks(tables, held, rule.together)
        count = len(blocks) // rule.together
        if count > rule.blocks or not (widen or rule.pays(tokens, contexts, count)):
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
