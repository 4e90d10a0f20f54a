"""[6] The interface for attention with one token per sequence, and its Triton implementation.

flashinfer_decode.py has FlashInfer's; choice.py chooses one for a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ep_server.backends.gpu.kernels.triton.paged import AttentionRule, PagedKv, Sequences
from ep_server.backends.gpu.kernels.triton.paged_decode import Workspace, decode, splits_for
from ep_server.models.families.spec import GqaSpec, MlaSpec


class DecodeLayer(Protocol):
    """Attention of one layer, for the sequences that it was made for."""

    def __call__(self, q: torch.Tensor, kv: PagedKv, rule: AttentionRule, out: torch.Tensor) -> None:
        """q: [S, heads, k_dim], its keys and values in the cache already. out: [S, heads, v_dim]."""
        ...


class DecodeKernels(Protocol):
    """Kernels that enqueue a step without reading anything on the host, so a graph may capture it."""

    def over(self, sequences: Sequences) -> DecodeLayer:
        """Prepares once what all layers of a step share. Results of rows of length 0 are finite."""
        ...


@dataclass(frozen=True, slots=True)
class TritonDecode:
    """heads, kv_heads: of queries, of the cache. v_dim: channels of a value. longest: context, tokens.

    num_sms: multiprocessors of the device; 0 = kernels are interpreted and contexts not split.
    hopper: layers that have a Hopper kernel (kernels/hopper) use that instead.
    """

    heads: int
    kv_heads: int
    v_dim: int
    longest: int
    num_sms: int
    hopper: bool = True

    def over(self, sequences: Sequences) -> DecodeLayer:
        """See DecodeKernels; a row of length 0 gives zeros."""
        return _TritonLayer(sequences, self)


def triton_decode(
    spec: GqaSpec | MlaSpec, longest: int, num_sms: int, *, hopper: bool = True
) -> TritonDecode:
    """Of a model. longest: context, tokens. num_sms: see capability.sm_count()."""
    if isinstance(spec, GqaSpec):
        return TritonDecode(spec.heads, spec.kv_heads, spec.head_dim, longest, num_sms, hopper)
    return TritonDecode(spec.heads, 1, spec.kv_lora, longest, num_sms, hopper)


class _TritonLayer:
    """Allocates its workspace at the first call: steps whose layers have Hopper kernels need none."""

    def __init__(self, sequences: Sequences, kernels: TritonDecode) -> None:
        self._sequences, self._kernels = sequences, kernels
        self._workspace: Workspace | None = None

    def __call__(self, q: torch.Tensor, kv: PagedKv, rule: AttentionRule, out: torch.Tensor) -> None:
        if self._workspace is None:
            self._workspace = self._room()
        decode(q, kv, self._sequences, rule, self._workspace, out)

    def _room(self) -> Workspace:
        by, lengths = self._kernels, self._sequences.lengths
        splits = splits_for(len(lengths), by.kv_heads, by.num_sms, by.longest)
        return Workspace.of(len(lengths), by.heads, splits, by.v_dim, lengths.device)
