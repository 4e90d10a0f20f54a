"""Weights of a model as records of tensors, in the fused layout the decoder computes with.

Shapes use H hidden, V vocabulary, E_local this rank's experts, I intermediate channels. All are contiguous
and of the serving dtype unless a field says float32. Linear weights are [out, in].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class GqaWeights:
    """Rope pairs are adjacent in q, k and their norms (see rope.py).

    qkv: [(heads + 2 * kv_heads) * head_dim, H]. out: [H, heads * head_dim].
    head_norm: [heads + kv_heads, head_dim], the q norm repeated, then the k norm (QkNorm.HEAD).
    q_norm, k_norm: [heads * head_dim], [kv_heads * head_dim] (QkNorm.FULL).
    """

    qkv: torch.Tensor
    out: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    out_bias: torch.Tensor | None = None
    head_norm: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """Latent attention with the key and value up-projections split per head.

    down: [q_lora + kv_lora + rope_dim, H]; without q_lora the full query projection comes first instead.
    q_up: [heads * (nope_dim + rope_dim), q_lora]. k_up: [heads, nope_dim, kv_lora].
    v_up: [heads, kv_lora, v_dim]. out: [H, heads * v_dim].
    """

    down: torch.Tensor
    kv_norm: torch.Tensor
    k_up: torch.Tensor
    v_up: torch.Tensor
    out: torch.Tensor
    q_norm: torch.Tensor | None = None
    q_up: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    out_bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class FfnWeights:
    """A dense or shared gated FFN. gate_up: [2 * I, H], gate rows first. down: [H, I]."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """This rank's experts, ascending by global id. gate_up: [E_local, 2 * I, H]. down: [E_local, H, I]."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """router: [E, H] float32. bias: [E] float32, the correction added for the choice only."""

    router: torch.Tensor
    experts: ExpertWeights
    bias: torch.Tensor | None = None
    shared: FfnWeights | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Norm weights are [H]."""

    attention_norm: torch.Tensor
    attention: GqaWeights | MlaWeights
    ffn_norm: torch.Tensor
    ffn: MoeWeights | FfnWeights


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Everything one rank holds. embedding, head: [V, H], one tensor where the checkpoint ties them."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Memory of all distinct tensors, bytes."""
        held = {t.data_ptr(): t.nbytes for t in _tensors(self)}
        return sum(held.values())


def _tensors(record: object) -> Iterator[torch.Tensor]:
    if isinstance(record, torch.Tensor):
        yield record
    elif isinstance(record, tuple):
        for item in record:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(record):
        for entry in dataclasses.fields(record):
            yield from _tensors(getattr(record, entry.name))
