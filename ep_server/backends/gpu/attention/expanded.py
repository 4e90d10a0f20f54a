"""[6] Latent attention of prompt chunks by the Hopper kernel, on keys and values expanded from latents."""

from __future__ import annotations

import torch

from ep_server.backends.gpu.chunk_copies import CopiedBlocks
from ep_server.backends.gpu.expansion import Expansion
from ep_server.backends.gpu.kernels.hopper.prefill import HopperLatentPrefill
from ep_server.backends.gpu.kernels.triton.expand import TILE, ExpandedKv, expand_blocks
from ep_server.backends.gpu.kernels.triton.paged import PagedKv, Sequences


class ExpandedPrefill:
    """All layers of a model, one after the other in one stream; of each, some heads after the others.

    Args:
        rule: how many. dtype: of the weights. scratch: of prefill_scratch().
    Raises: InternalError for a shape without a Hopper kernel.
    """

    def __init__(
        self, rule: Expansion, dtype: torch.dtype, device: torch.device, scratch: torch.Tensor
    ) -> None:
        spec, positions = rule.spec, rule.blocks * TILE
        shapes = (rule.heads, positions, spec.nope_dim), (rule.heads, positions, spec.v_dim)
        k, v, rope = (
            torch.empty(shape, dtype=dtype, device=device) for shape in (*shapes, (positions, spec.rope_dim))
        )
        self._expanded, self._heads = ExpandedKv(k, v, rope), rule.heads
        self._kernel = HopperLatentPrefill(self._expanded, spec.scale, scratch)
        self._programs = max(rule.num_sms, 1)  # their shared memory leaves room for one on a multiprocessor

    def run(
        self,
        q: torch.Tensor,
        query_start: torch.Tensor,
        kv: PagedKv,
        up: tuple[torch.Tensor, torch.Tensor],
        copy: CopiedBlocks,
        lengths: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attends with the tokens of chunks over the layer `kv`. Can be captured.

        Args:
            q: [T, heads, nope_dim + rope_dim], rows may have a pitch. out: [T, heads, v_dim].
            query_start, lengths: as for HopperPrefill.run().
            up: [heads, nope_dim, kv_lora] and [heads, kv_lora, v_dim].
        """
        key_up, value_up = up
        scale = None if kv.k_scale is None else kv.k_scale.expand(self._heads).contiguous()
        for first in range(0, q.shape[1], self._heads):
            some = slice(first, first + self._heads)
            of_heads = key_up[some], value_up[some], self._expanded, self._programs
            expand_blocks(kv, copy.blocks, copy.count, *of_heads)
            sequences = Sequences(copy.tables, lengths)
            scales = None if scale is None else (scale, scale)
            self._kernel.run(q[:, some], query_start, sequences, out[:, some], scales)
