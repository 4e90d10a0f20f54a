"""Whether the prompt chunks of a step attend to an FP8 cache by a copy that is widened to bfloat16.

Tensor cores have no product of bfloat16 and FP8 values, so the Hopper kernel needs the copy; Triton's kernel
widens what it loads, at a third of the rate. Units: tokens, blocks, bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ep_server.backends.gpu.chunk_copies import (
    HOPPER_FLOPS,
    HOPPER_PARTS,
    HOPPER_ROWS,
    LAUNCH_SECONDS,
    MOST_BYTES,
    tiles_seconds,
)
from ep_server.models.families.spec import GqaSpec

TRITON_FLOPS = 280e12  # measured as HOPPER_FLOPS
TRITON_ROWS = 64  # of a tile
COPY_BYTES = 2e12  # per second, read and written; assumed, not measured


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
