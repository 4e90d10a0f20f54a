"""Weights of a model as records, in the fused layout the decoder computes with.

Shapes use H hidden, V vocabulary, E_local this rank's experts, I intermediate channels. All are of the
serving dtype unless a field says float32. Matrices are [out, in]; most are prepared by a `Compute`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ep_server.models.compute import GatedFfn, HeadLinear, Linear
from ep_server.models.families.spec import GqaSpec, MlaSpec


@dataclass(frozen=True, slots=True)
class KvScales:
    """Scales of one layer of an FP8 KV cache: value = code * scale.

    k: [kv_heads] float32. v: the same; None for latent attention, whose values are keys.
    """

    k: torch.Tensor
    v: torch.Tensor | None

    @staticmethod
    def ones(attention: GqaSpec | MlaSpec, device: torch.device | None = None) -> KvScales:
        """What a cache has without a checkpoint's scales."""
        if isinstance(attention, MlaSpec):
            return KvScales(torch.ones(1, device=device), None)
        return KvScales(*(torch.ones(attention.kv_heads, device=device) for _ in "kv"))

    def to(self, device: torch.device) -> KvScales:
        """The same on a device."""
        return KvScales(self.k.to(device), None if self.v is None else self.v.to(device))


@dataclass(frozen=True, slots=True)
class GqaWeights:
    """Rope pairs are adjacent in q, k and their norms (see rope.py).

    qkv: [(heads + 2 * kv_heads) * head_dim, H]. out: [H, heads * head_dim].
    head_norm: [heads + kv_heads, head_dim], the q norm repeated, then the k norm (QkNorm.HEAD).
    q_norm, k_norm: [heads * head_dim], [kv_heads * head_dim] (QkNorm.FULL).
    """

    qkv: Linear
    out: Linear
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

    down: Linear
    kv_norm: torch.Tensor
    k_up: HeadLinear
    v_up: HeadLinear
    out: Linear
    q_norm: torch.Tensor | None = None
    q_up: Linear | None = None


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """router: [E, H] float32. bias: [E] float32, the correction added for the choice only.

    experts: E_local FFNs, this rank's, ascending by global id. shared: one FFN of all tokens.
    """

    router: Linear
    experts: GatedFfn
    bias: torch.Tensor | None = None
    shared: GatedFfn | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Norm weights are [H]. ffn: experts, or one dense FFN.

    kv_scales: that the checkpoint brings for an FP8 cache, if any.
    """

    attention_norm: torch.Tensor
    attention: GqaWeights | MlaWeights
    ffn_norm: torch.Tensor
    ffn: MoeWeights | GatedFfn
    kv_scales: KvScales | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Everything one rank holds. embedding, head: [V, H], of equal values where the checkpoint ties them."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Linear

    @property
    def nbytes(self) -> int:
        """Memory of all distinct tensors, bytes."""
        held = {t.data_ptr(): t.nbytes for t in tensors_of(self)}
        return sum(held.values())


def replicated_tensors(weights: ModelWeights) -> list[torch.Tensor]:
    """All distinct tensors but those of experts, in a fixed order."""
    experts = {
        id(tensor)
        for layer in weights.layers
        if isinstance(layer.ffn, MoeWeights)
        for tensor in tensors_of(layer.ffn.experts)
    }
    return list({id(t): t for t in tensors_of(weights) if id(t) not in experts}.values())


def tensors_of(record: object) -> Iterator[torch.Tensor]:
    """All tensors of a record and of the records in it."""
    if isinstance(record, torch.Tensor):
        yield record
    elif isinstance(record, tuple):
        for item in record:
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(record):
        for entry in dataclasses.fields(record):
            yield from tensors_of(getattr(record, entry.name))
