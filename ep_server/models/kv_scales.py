"""Scales of an FP8 KV cache: those that a checkpoint brings for its layers.

Value = code * scale. A checkpoint has one for all KV heads, or one per head; the files of several quantisers
are known by the names they give them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ep_server.errors import CheckpointError
from ep_server.models.families.spec import GqaSpec, MlaSpec
from ep_server.models.tensors import TensorSource

# Of a layer's attention, for keys (or the latent) and values; the first that is there counts.
_NAMES = {
    "k": ("k_scale", "attn.k_scale", "k_proj.k_scale"),
    "v": ("v_scale", "attn.v_scale", "v_proj.v_scale"),
}


@dataclass(frozen=True, slots=True)
class KvScales:
    """Of one layer. k: [kv_heads] float32. v: the same; None for latent attention, whose values are keys."""

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


def read_kv_scales(source: TensorSource, prefix: str, attention: GqaSpec | MlaSpec) -> KvScales | None:
    """What the checkpoint has for the attention whose tensors begin with `prefix`; None where nothing.

    Raises: CheckpointError for k without v, or a scale that is not a positive number.
    """
    heads = attention.kv_heads if isinstance(attention, GqaSpec) else 1
    k, v = (_scale(source, prefix, kind, heads) for kind in ("k", "v"))
    if isinstance(attention, MlaSpec):
        return None if k is None else KvScales(k, None)
    if k is None and v is None:
        return None
    if k is None or v is None:
        there, lost = ("v", "k") if k is None else ("k", "v")
        raise CheckpointError(f"{prefix}: there is a {there}_scale of the KV cache, but no {lost}_scale")
    return KvScales(k, v)


def _scale(source: TensorSource, prefix: str, kind: str, heads: int) -> torch.Tensor | None:
    """[heads] float32."""
    for name in (f"{prefix}.{end}" for end in _NAMES[kind]):
        scale = source.read_vector(name, (1, heads))
        if scale is None:
            continue
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise CheckpointError(f"{name} = {scale.tolist()}: must be positive numbers")
        return scale.expand(heads).contiguous()
    return None
