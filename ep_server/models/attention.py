"""[6] The two attention blocks, grouped-query and latent (MLA), and rotary position embeddings.

They surround `Compute.attend` with projections, norms, rope and cache writes. Latent attention runs in its
absorbed form: one shared key head of kv_lora + rope_dim channels; its first kv_lora channels are the values.
Rope pairs are adjacent channels (2i, 2i + 1). Checkpoints that pair (i, i + dim / 2) are reordered at load by
`adjacent_pairs`, which changes neither norms nor attention scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ep_server.models.batch import AttentionMeta
from ep_server.models.compute import Attend, Compute
from ep_server.models.families.spec import GqaSpec, MlaSpec, RopeSpec, RopeType
from ep_server.models.kv_cache import KvLayer
from ep_server.models.layers import GqaWeights, MlaWeights


def frequencies(spec: RopeSpec) -> torch.Tensor:
    """[dim / 2] float32, radians per position."""
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim
    periods = torch.pow(torch.tensor(spec.theta), exponents)
    if spec.type is RopeType.DEFAULT:
        return 1.0 / periods
    if spec.type is RopeType.LINEAR:
        return 1.0 / periods / spec.factor
    keep = 1.0 - _yarn_ramp(spec)  # 1 = the original frequency, 0 = stretched by the factor
    return (1.0 / (spec.factor * periods)) * (1.0 - keep) + (1.0 / periods) * keep


def rotation_table(spec: RopeSpec, positions: int) -> torch.Tensor:
    """[positions, dim / 2] complex64: what each pair is multiplied with at each position."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies(spec))
    return torch.polar(torch.full_like(angles, spec.attention_factor), angles)


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotates x: [T, heads, dim] by rotation: [T, 1, dim / 2] complex64; computed and returned in float32."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2)


def adjacent_pairs(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Reorders each group of `dim` rows so that rows i and i + dim / 2 become rows 2i and 2i + 1.

    Args:
        rows: [n * dim, ...], a projection, its bias or a norm weight.
    """
    return rows.reshape(-1, 2, dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _yarn_ramp(spec: RopeSpec) -> torch.Tensor:
    """[dim / 2] float32: 0 for channels that turn often in the original context, 1 for slow ones."""

    def channel(turns: float) -> float:
        return spec.dim * math.log(spec.original_context / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = channel(spec.beta_fast), channel(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    high += 0.001 if low == high else 0.0  # a ramp of width 0 divides by 0
    steps = (torch.arange(spec.dim // 2, dtype=torch.float32) - low) / (high - low)
    return steps.clamp(0, 1)


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
