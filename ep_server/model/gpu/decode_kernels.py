"""[6] Attention with one token per sequence, as the layers call it, and our Triton kernels behind that face.

FlashInfer's stand in flashinfer_decode.py; which of the two a rank takes: attention_choice.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from ep_server.model.families.spec import GqaSpec, MlaSpec
from ep_server.model.triton.paged import PagedKv
from ep_server.model.triton.paged_decode import Workspace, decode, splits_for
from ep_server.model.triton.paged_tile import AttentionRule, Sequences


class DecodeLayer(Protocol):
    """Attends in one layer with the sequences that it was made for."""

    def __call__(self, q: torch.Tensor, kv: PagedKv, rule: AttentionRule, out: torch.Tensor) -> None:
        """q: [S, heads, k_dim], its keys and values in the cache already. out: [S, heads, v_dim]."""
        ...


class DecodeKernels(Protocol):
    """Kernels that enqueue a step without a word from the host, so a captured graph may hold it."""

    def over(self, sequences: Sequences) -> DecodeLayer:
        """What all layers of a step share is made here, once. Rows of length 0 give numbers nobody reads."""
        ...


@dataclass(frozen=True, slots=True)
class TritonDecode:
    """heads, kv_heads: of queries, of the cache. v_dim: channels of a value. longest: context, tokens.

    num_sms: multiprocessors of the device; 0 = kernels are interpreted, nothing is split.
    streamed: layers that have a kernel for Hopper (streamed_attention.py, streamed_latent.py) take that
      instead.
    """

    heads: int
    kv_heads: int
    v_dim: int
    longest: int
    num_sms: int
    streamed: bool = True

    def over(self, sequences: Sequences) -> DecodeLayer:
        """See DecodeKernels; a row of length 0 gives zeros."""
        count = len(sequences.lengths)
        splits = splits_for(count, self.kv_heads, self.num_sms, self.longest)
        workspace = Workspace.of(count, self.heads, splits, self.v_dim, sequences.lengths.device)
        return partial(_layer, sequences, workspace)


def triton_decode(
    spec: GqaSpec | MlaSpec, longest: int, num_sms: int, *, streamed: bool = True
) -> TritonDecode:
    """Of a model. longest: context, tokens. num_sms: see capability.sm_count()."""
    if isinstance(spec, GqaSpec):
        return TritonDecode(spec.heads, spec.kv_heads, spec.head_dim, longest, num_sms, streamed)
    return TritonDecode(spec.heads, 1, spec.kv_lora, longest, num_sms, streamed)


def _layer(
    sequences: Sequences,
    workspace: Workspace,
    q: torch.Tensor,
    kv: PagedKv,
    rule: AttentionRule,
    out: torch.Tensor,
) -> None:
    decode(q, kv, sequences, rule, workspace, out)
