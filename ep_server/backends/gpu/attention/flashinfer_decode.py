"""[6] Attention with one token per sequence by FlashInfer's XQA kernel (see decode_kernels.py).

XQA reads block tables and lengths on the device and plans nothing on the host, so it can be captured in a
graph. Its cache layout "NHD" is ours: [blocks, block_size, kv_heads, head_dim]. The rest is translated:

    scores    q_scale / sqrt(head_dim) * q . k           ours: scale * q . k
    lengths   uint32 [S, 1]                              ours: int32 [S]
    window    the last sliding_win_size positions        the same
    length 0  NaN where contexts are split               ours: zeros, so such a row attends to one position

FlashInfer compiles a module for each block size, head dim and group at its first call. That takes about
fifteen seconds. The result is cached in ~/.cache/flashinfer, or below FLASHINFER_WORKSPACE_BASE.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ep_server.backends.gpu.attention.decode_kernels import DecodeLayer
from ep_server.backends.gpu.kernels.triton.launch import expect
from ep_server.backends.gpu.kernels.triton.paged import AttentionRule, PagedKv, Sequences
from ep_server.errors import InternalError
from ep_server.models.kv_cache import KvLayer

# A part of a context produces `group` rows of head_dim 2-byte numbers and two floats each: at most 17 KiB.
PART_BYTES = 32 << 10
Xqa = Callable[..., None]  # flashinfer.xqa.xqa


@dataclass(frozen=True, slots=True)
class XqaShape:
    """The parameters that a module is compiled for. All BF16."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    windowed: bool = False


class FlashInferDecode:
    """XQA over one model's layers. One thread uses it; calls run one after the other on one stream.

    Args:
        xqa: the library's entry point. num_sms: multiprocessors of the device. It also limits the parts of
          all contexts and KV heads together, and so the workspace memory.
    """

    def __init__(self, xqa: Xqa, shape: XqaShape, num_sms: int, device: torch.device) -> None:
        self._xqa, self._shape, self._num_sms = xqa, shape, num_sms
        self._scratch = torch.empty(num_sms * PART_BYTES, dtype=torch.uint8, device=device)
        self._semaphores = torch.zeros(num_sms, dtype=torch.int32, device=device).view(torch.uint32)

    def over(self, sequences: Sequences) -> DecodeLayer:
        """See DecodeKernels.

        Args:
            sequences: int32, tables without a pitch; the first entry of a row of length 0 is a block too.
        Raises: InternalError for another shape, dtype or layout.
        """
        blocks, lengths = sequences.blocks, sequences.lengths
        expect("lengths", lengths, torch.int32, (None,))
        expect("blocks", blocks, torch.int32, (len(lengths), None))
        return partial(self._layer, blocks, lengths.clamp(min=1).view(torch.uint32).unsqueeze(1))

    def prepare(self) -> None:
        """Compiles or loads the module and runs it once. Raises: any error of the library."""
        s, device = self._shape, self._scratch.device
        cache = torch.zeros(1, s.block_size, s.kv_heads, s.head_dim, dtype=torch.bfloat16, device=device)
        q = torch.zeros(1, s.heads, s.head_dim, dtype=torch.bfloat16, device=device)
        once = torch.zeros(1, dtype=torch.int32, device=device)
        rule = AttentionRule(1.0, s.block_size if s.windowed else 0)
        kv = PagedKv(KvLayer(cache, cache, s.head_dim))
        self.over(Sequences(once.view(1, 1), once))(q, kv, rule, torch.empty_like(q))

    def _layer(
        self,
        blocks: torch.Tensor,
        lengths: torch.Tensor,
        q: torch.Tensor,
        kv: PagedKv,
        rule: AttentionRule,
        out: torch.Tensor,
    ) -> None:
        self._check(len(lengths), q, kv, rule, out)
        if not len(q):
            return
        self._xqa(
            q=q.unsqueeze(1),
            k_cache=kv.layer.k,
            v_cache=kv.layer.v,
            page_table=blocks,
            seq_lens=lengths,
            output=out.unsqueeze(1),
            workspace_buffer=self._scratch,
            semaphores=self._semaphores,
            num_kv_heads=self._shape.kv_heads,
            page_size=self._shape.block_size,
            q_scale=rule.scale * math.sqrt(self._shape.head_dim),
            kv_scale=1.0,
            sliding_win_size=rule.window,
            kv_layout="NHD",
            sm_count=self._num_sms,
            enable_pdl=True,
        )

    def _check(
        self, count: int, q: torch.Tensor, kv: PagedKv, rule: AttentionRule, out: torch.Tensor
    ) -> None:
        """Checks the arguments, which the library does not. Raises: InternalError."""
        s = self._shape
        for name, tensor in (("q", q), ("out", out)):
            expect(name, tensor, torch.bfloat16, (count, s.heads, s.head_dim))
        for name, cache in (("cache k", kv.layer.k), ("cache v", kv.layer.v)):
            if cache is None:
                raise InternalError(f"{name}: None, FlashInfer's decode has no latent attention")
            expect(name, cache, torch.bfloat16, (None, s.block_size, s.kv_heads, s.head_dim))
        if bool(rule.window) != s.windowed:
            raise InternalError(f"window = {rule.window}: the module was compiled with windowed={s.windowed}")


def load_xqa() -> Xqa:
    """The library's entry point. Raises: ImportError, OSError (its cache folder cannot be written)."""
    from flashinfer.xqa import xqa

    entry: Xqa = xqa
    return entry
