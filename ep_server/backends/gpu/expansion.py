"""Whether the prompt chunks of a step attend to keys and values that are expanded from latents.

Absorbed, each head multiplies queries of kv_lora + rope_dim channels with the cached latents, and weights
with kv_lora of their channels: 2,176 FLOP for a (query, position) pair and head of DeepSeek's models.
Expanded, keys have nope_dim + rope_dim channels and values v_dim: 640 FLOP. To expand a position takes as
many FLOP as to absorb a query and to bring its result back, 262,144 for each head, so only positions before
the chunk cost more: it pays where enough queries of a step see a position.

The heads are expanded a few at a time into scratch memory, which all layers use. Where a step's contexts do
not fit, or it does not pay, Triton's kernel attends, absorbed. Units: tokens, bytes.
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
from ep_server.backends.gpu.kernels.triton.expand import TILE
from ep_server.models.families.spec import MlaSpec

# Of a launch: 16 heads fill a GPU with about 1,000 tokens, and MOST_BYTES hold 64,512 positions of them.
MOST_HEADS = 16
# FLOP per second on a full GPU, measured (docs/design-notes/2026-11-hopper-mla.md): of Triton's kernel over
# latents, and of products with the up-projections.
ABSORBED_FLOPS, PRODUCT_FLOPS = 90e12, 450e12
ABSORBED_ROWS = 32  # (token, head) pairs of a tile of Triton's kernel


@dataclass(frozen=True, slots=True)
class Expansion:
    """When to expand. blocks: of TILE positions, that fit into the scratch memory.

    num_sms: multiprocessors.
    """

    spec: MlaSpec
    block_size: int
    blocks: int
    num_sms: int

    @staticmethod
    def of(spec: MlaSpec, block_size: int, wanted: int, num_sms: int) -> Expansion:
        """Room for `wanted` tiles, or for as many as MOST_BYTES hold."""
        rule = Expansion(spec, block_size, wanted, num_sms)
        return replace(rule, blocks=min(wanted, MOST_BYTES // rule.tile_bytes))

    @property
    def together(self) -> int:
        """See CopyRule."""
        return TILE // self.block_size

    @property
    def heads(self) -> int:
        """Expanded at a time."""
        return max(n for n in range(1, MOST_HEADS + 1) if self.spec.heads % n == 0)

    @property
    def tile_bytes(self) -> int:
        """Of a tile's keys and values."""
        return TILE * (self.heads * (self.spec.nope_dim + self.spec.v_dim) + self.spec.rope_dim) * 2

    @property
    def nbytes(self) -> int:
        """Of the scratch memory."""
        return self.blocks * self.tile_bytes

    def pays(self, tokens: np.ndarray, contexts: np.ndarray, blocks: int) -> bool:
        """Whether expansion and Hopper kernel take less time than Triton's kernel, by the rates above.

        On a full GPU that means about 30 tokens of a chunk behind a long context. Triton's kernel does not
        cut contexts, so with few tokens and heads it leaves multiprocessors idle. Arguments: see CopyRule.
        """
        spec = self.spec
        launches = 2 * (spec.heads // self.heads) * LAUNCH_SECONDS
        up = 2.0 * spec.kv_lora * (spec.nope_dim + spec.v_dim) * spec.heads  # FLOP for a position or a query
        full = blocks * self.heads / max(self.num_sms, 1)
        expansion = tiles_seconds(blocks * TILE * up, full, PRODUCT_FLOPS)
        expanded = launches + expansion + self._expanded_seconds(tokens, contexts)
        absorbed = int(tokens.sum()) * up / PRODUCT_FLOPS + self._absorbed_seconds(tokens, contexts)
        return expanded < absorbed

    def _expanded_seconds(self, tokens: np.ndarray, contexts: np.ndarray) -> float:
        """Of the Hopper kernel, whose tiles are tokens of one head; each is padded."""
        tiles = -(-tokens // HOPPER_ROWS) * self.heads
        channels = self.spec.nope_dim + self.spec.rope_dim + self.spec.v_dim
        work = float((tiles * (contexts - tokens / 2)).sum()) * HOPPER_ROWS * channels * 2
        full = int(tiles.sum()) * HOPPER_PARTS / max(self.num_sms, 1)
        return tiles_seconds(work, full, HOPPER_FLOPS) * (self.spec.heads // self.heads)

    def _absorbed_seconds(self, tokens: np.ndarray, contexts: np.ndarray) -> float:
        """Of Triton's kernel, whose tiles are pairs of tokens and heads."""
        together = min(self.spec.heads, ABSORBED_ROWS)
        tiles = -(-tokens // (ABSORBED_ROWS // together)) * -(-self.spec.heads // together)
        channels = 2 * self.spec.kv_lora + self.spec.rope_dim
        work = float((tiles * (contexts - tokens / 2)).sum()) * ABSORBED_ROWS * channels * 2
        return tiles_seconds(work, int(tiles.sum()) / max(self.num_sms, 1), ABSORBED_FLOPS)
