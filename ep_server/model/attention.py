"""Attention over the paged KV cache: grouped-query and latent, decode and prefill mixed in one batch.

`paged_attention` is the one function a faster kernel replaces; everything around it is projections, norms
and rope. Latent attention runs in its absorbed form: one shared key head of kv_lora + rope_dim channels
whose first kv_lora channels are the values. Knows nothing of layers, experts or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ep_server.model.batch import AttentionMeta
from ep_server.model.families.spec import GqaSpec, MlaSpec
from ep_server.model.kv_cache import KvLayer
from ep_server.model.layers import GqaWeights, MlaWeights
from ep_server.model.rope import rotate


@dataclass(frozen=True, slots=True)
class Gather:
    """Torch's view of a batch: which cache slots each sequence reads. Made once per micro-batch.

    decode_slots: [D, longest] int64; a short sequence's row is filled up with its own first slot, so that
      memory never written is never read. decode_mask: [D, 1, 1, longest] additive, None = all visible.
    prefill: per other sequence its slots [L] and its mask [rows, L] additive.
    """

    decode_slots: torch.Tensor
    decode_mask: torch.Tensor | None
    prefill: tuple[tuple[torch.Tensor, torch.Tensor], ...]


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """What attention needs of a micro-batch. rotation: [T, 1, dim / 2] complex64."""

    meta: AttentionMeta
    gather: Gather
    rotation: torch.Tensor
    eps: float


def gather_plan(meta: AttentionMeta, window: int, dtype: torch.dtype) -> Gather:
    """Slots and masks for `paged_attention`. window: tokens visible backwards, 0 = all. dtype: of q."""
    count = meta.num_decode
    context = torch.tensor(meta.context, dtype=torch.int64)
    offsets = torch.arange(meta.block_size)
    all_slots = (meta.blocks[:, :, None] * meta.block_size + offsets).flatten(1)
    longest = max(meta.context[:count], default=0)
    columns = torch.arange(longest)
    last = context[:count, None] - 1
    slots = all_slots[:count, :longest]
    slots = torch.where(columns <= last, slots, slots[:, :1])
    mask = None
    if count and (window or min(meta.context[:count]) < longest):
        mask = _additive(_visible(last, columns, window), dtype)[:, None, None, :]
    prefill = []
    for i in range(count, len(meta.context)):
        rows = meta.positions[meta.query_start[i] : meta.query_start[i + 1], None]
        columns = torch.arange(meta.context[i])
        visible = _visible(rows, columns, window)
        prefill.append((all_slots[i, : meta.context[i]], _additive(visible, dtype)))
    return Gather(slots, mask, tuple(prefill))


def paged_attention(
    q: torch.Tensor, kv: KvLayer, meta: AttentionMeta, gather: Gather, scale: float
) -> torch.Tensor:
    """Softmax attention of each row over the cached positions up to its own.

    Args:
        q: [T, heads, k_dim]. The keys and values of these T tokens are already in `kv`.
        gather: made by `gather_plan` for the same meta.
    Returns: [T, heads, v_dim] of q's dtype.
    """
    heads_kv = kv.k.shape[2]
    keys = kv.k.flatten(0, 1)
    values = keys if kv.v is None else kv.v.flatten(0, 1)
    grouped = q.view(len(q), heads_kv, q.shape[1] // heads_kv, q.shape[2])  # [T, kv_heads, group, k_dim]
    outputs = []
    count = meta.num_decode
    if count:
        k = keys[gather.decode_slots].transpose(1, 2)  # [D, kv_heads, longest, k_dim]
        v = k if kv.v is None else values[gather.decode_slots].transpose(1, 2)
        out = F.scaled_dot_product_attention(grouped[:count], k, v, attn_mask=gather.decode_mask, scale=scale)
        outputs.append(out.flatten(1, 2))
    for i, (slots, mask) in enumerate(gather.prefill, start=count):
        rows = grouped[meta.query_start[i] : meta.query_start[i + 1]].permute(1, 2, 0, 3)
        k = keys[slots].transpose(0, 1)[:, None].expand(-1, rows.shape[1], -1, -1)
        v = k if kv.v is None else values[slots].transpose(0, 1)[:, None].expand(-1, rows.shape[1], -1, -1)
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
        outputs.append(out.permute(2, 0, 1, 3).flatten(1, 2))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined[..., : kv.v_dim]


def gqa(x: torch.Tensor, w: GqaWeights, spec: GqaSpec, kv: KvLayer, at: AttentionInput) -> torch.Tensor:
    """Grouped-query attention of x: [T, H], normed, to [T, H]; stores the tokens' K and V in `kv`."""
    q_width, heads = spec.heads * spec.head_dim, spec.heads + spec.kv_heads
    qkv = F.linear(x, w.qkv, w.qkv_bias)
    qk, v = qkv[:, : heads * spec.head_dim], qkv[:, heads * spec.head_dim :]
    if w.q_norm is not None and w.k_norm is not None:
        q = F.rms_norm(qk[:, :q_width], w.q_norm.shape, w.q_norm, at.eps)
        qk = torch.cat([q, F.rms_norm(qk[:, q_width:], w.k_norm.shape, w.k_norm, at.eps)], dim=1)
    if spec.clip:
        qk, v = qk.clamp(-spec.clip, spec.clip), v.clamp(-spec.clip, spec.clip)
    qk = qk.view(len(x), heads, spec.head_dim)
    if w.head_norm is not None:
        qk = F.rms_norm(qk, (spec.head_dim,), None, at.eps) * w.head_norm
    qk = rotate(qk, at.rotation).to(x.dtype)
    kv.write(at.meta.slots, qk[:, spec.heads :], v.view(len(x), spec.kv_heads, spec.head_dim))
    out = paged_attention(qk[:, : spec.heads], kv, at.meta, at.gather, spec.scale)
    return F.linear(out.flatten(1), w.out, w.out_bias)


def mla(x: torch.Tensor, w: MlaWeights, spec: MlaSpec, kv: KvLayer, at: AttentionInput) -> torch.Tensor:
    """Latent attention of x: [T, H], normed, to [T, H]; stores the tokens' latents in `kv`."""
    down = F.linear(x, w.down, w.down_bias)
    q_width = down.shape[1] - spec.kv_lora - spec.rope_dim
    q, latent, k_rope = torch.split(down, [q_width, spec.kv_lora, spec.rope_dim], dim=1)
    if w.q_up is not None and w.q_norm is not None:
        q = F.linear(F.rms_norm(q, w.q_norm.shape, w.q_norm, spec.norm_eps), w.q_up)
    q = q.view(len(x), spec.heads, spec.nope_dim + spec.rope_dim)
    ropes = rotate(torch.cat([q[..., spec.nope_dim :], k_rope[:, None]], dim=1), at.rotation).to(x.dtype)
    latent = F.rms_norm(latent, w.kv_norm.shape, w.kv_norm, spec.norm_eps)
    kv.write(at.meta.slots, torch.cat([latent[:, None], ropes[:, spec.heads :]], dim=2))
    q_latent = torch.bmm(q[..., : spec.nope_dim].transpose(0, 1), w.k_up).transpose(0, 1)
    q = torch.cat([q_latent, ropes[:, : spec.heads]], dim=2)
    out = paged_attention(q, kv, at.meta, at.gather, spec.scale)  # [T, heads, kv_lora]
    out = torch.bmm(out.transpose(0, 1), w.v_up).transpose(0, 1)
    return F.linear(out.flatten(1), w.out, w.out_bias)


def _visible(rows: torch.Tensor, columns: torch.Tensor, window: int) -> torch.Tensor:
    visible = columns <= rows
    return visible & (columns > rows - window) if window else visible


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
