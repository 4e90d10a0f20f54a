"""Attention blocks over the paged KV cache: grouped-query and latent.

What stands around `Compute.attend`: projections, norms, rope and the cache's writes. Latent attention runs
in its absorbed form: one shared key head of kv_lora + rope_dim channels whose first kv_lora channels are the
values. Knows nothing of layers, experts or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ep_server.models.batch import AttentionMeta
from ep_server.models.compute import Attend, Compute
from ep_server.models.families.spec import GqaSpec, MlaSpec
from ep_server.models.kv_cache import KvLayer
from ep_server.models.layers import GqaWeights, MlaWeights
from ep_server.models.rope import rotate


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """What attention needs of a micro-batch. rotation: [T, 1, dim / 2] complex64."""

    meta: AttentionMeta
    attend: Attend
    compute: Compute
    rotation: torch.Tensor
    eps: float


def gqa(x: torch.Tensor, w: GqaWeights, spec: GqaSpec, kv: KvLayer, at: AttentionInput) -> torch.Tensor:
    """Grouped-query attention of x: [T, H], normed, to [T, H]; stores the tokens' K and V in `kv`."""
    q_width, heads = spec.heads * spec.head_dim, spec.heads + spec.kv_heads
    qkv = w.qkv(x)
    qk, v = qkv[:, : heads * spec.head_dim], qkv[:, heads * spec.head_dim :]
    if w.q_norm is not None and w.k_norm is not None:
        q = at.compute.rms_norm(qk[:, :q_width], w.q_norm, at.eps)
        qk = torch.cat([q, at.compute.rms_norm(qk[:, q_width:], w.k_norm, at.eps)], dim=1)
    if spec.clip:
        qk, v = qk.clamp(-spec.clip, spec.clip), v.clamp(-spec.clip, spec.clip)
    qk = qk.view(len(x), heads, spec.head_dim)
    if w.head_norm is not None:
        qk = at.compute.rms_norm(qk, w.head_norm, at.eps)
    qk = rotate(qk, at.rotation).to(x.dtype)
    kv.write(at.meta.slots, qk[:, spec.heads :], v.view(len(x), spec.kv_heads, spec.head_dim))
    out = at.attend(qk[:, : spec.heads], kv, spec.scale)
    return w.out(out.flatten(1))


def mla(x: torch.Tensor, w: MlaWeights, spec: MlaSpec, kv: KvLayer, at: AttentionInput) -> torch.Tensor:
    """Latent attention of x: [T, H], normed, to [T, H]; stores the tokens' latents in `kv`."""
    down = w.down(x)
    q_width = down.shape[1] - spec.kv_lora - spec.rope_dim
    q, latent, k_rope = torch.split(down, [q_width, spec.kv_lora, spec.rope_dim], dim=1)
    if w.q_up is not None and w.q_norm is not None:
        q = w.q_up(at.compute.rms_norm(q, w.q_norm, spec.norm_eps))
    q = q.view(len(x), spec.heads, spec.nope_dim + spec.rope_dim)
    ropes = rotate(torch.cat([q[..., spec.nope_dim :], k_rope[:, None]], dim=1), at.rotation).to(x.dtype)
    latent = at.compute.rms_norm(latent, w.kv_norm, spec.norm_eps)
    kv.write(at.meta.slots, torch.cat([latent[:, None], ropes[:, spec.heads :]], dim=2))
    q_latent = w.k_up(q[..., : spec.nope_dim])
    q = torch.cat([q_latent, ropes[:, : spec.heads]], dim=2)
    out = at.attend(q, kv, spec.scale)  # [T, heads, kv_lora]
    return w.out(w.v_up(out).flatten(1))
