"""[6] Attention of prompt chunks over an FP8 cache by the Hopper kernel, on a copy in bfloat16."""

from __future__ import annotations

import torch

from ep_server.backends.gpu.chunk_copies import CopiedBlocks
from ep_server.backends.gpu.kernels.hopper.prefill import HopperPrefill
from ep_server.backends.gpu.kernels.triton.paged import PagedKv, Sequences
from ep_server.backends.gpu.kernels.triton.widen import widen_blocks
from ep_server.backends.gpu.widening import Widening
from ep_server.models.families.spec import GqaSpec
from ep_server.models.kv_cache import KvLayer

_PROGRAMS = 8  # of the copy, per multiprocessor


class WidenedPrefill:
    """All layers of a model, one after the other in one stream. The scales of the codes are applied exactly.

    Args:
        scratch: of prefill_scratch(). Raises: InternalError for a shape without a Hopper kernel.
    """

    def __init__(self, spec: GqaSpec, rule: Widening, device: torch.device, scratch: torch.Tensor) -> None:
        shape = (rule.blocks, rule.block_size, spec.kv_heads, spec.head_dim)
        k, v = (torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in "kv")
        self._copy = KvLayer(k, v, spec.head_dim)
        self._kernel = HopperPrefill(PagedKv(self._copy), spec, scratch)
        self._programs = _PROGRAMS * max(rule.num_sms, 1)

    def run(
        self,
        q: torch.Tensor,
        query_start: torch.Tensor,
        kv: PagedKv,
        widened: CopiedBlocks,
        lengths: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attends with the tokens of chunks over the layer `kv`. Can be captured.

        Args:
            q, query_start, lengths, out: as for HopperPrefill.run().
        """
        widen_blocks(kv, widened.blocks, widened.count, self._copy, self._programs)
        assert kv.k_scale is not None and kv.v_scale is not None
        sequences = Sequences(widened.tables, lengths)
        self._kernel.run(q, query_start, sequences, out, (kv.k_scale, kv.v_scale))
