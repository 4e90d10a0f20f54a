"""[6] Attention of one layer: projections by torch or streamed, everything between them in fused kernels.

Reads and writes the paged cache in place. Weights are those of layers.py, prepared by TorchCompute.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ep_server.model.families.spec import GqaSpec, MlaSpec
from ep_server.model.gpu.decode_kernels import DecodeLayer
from ep_server.model.gpu.step_input import StepTensors
from ep_server.model.gpu.streamed_attention import StreamedAttention, StreamedStep
from ep_server.model.gpu.streamed_products import Limits, StreamedProduct, product, streamed_product
from ep_server.model.layers import GqaWeights, MlaWeights
from ep_server.model.torch_compute import TorchLinear
from ep_server.model.triton.norm import rms_norm
from ep_server.model.triton.paged import PagedKv
from ep_server.model.triton.paged_prefill import prefill
from ep_server.model.triton.paged_tile import AttentionRule, Sequences
from ep_server.model.triton.partial import Partial
from ep_server.model.triton.rope import HeadNorm, Rotation, store_gqa
from ep_server.model.triton.rope_latent import MlaInput, store_mla


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What all layers of a step share. decode: over its first `step.decode` sequences.

    streamed: of its single tokens, for the layers that have a kernel for them.
    """

    step: StepTensors
    rotation: Rotation
    decode: DecodeLayer
    eps: float
    streamed: StreamedStep | None = None


@dataclass(frozen=True, slots=True)
class GqaKernels:
    """What a layer has for Hopper: its projections, for few rows, and all that stands between them."""

    qkv: StreamedProduct | None = None
    out: StreamedProduct | None = None
    attention: StreamedAttention | None = None

    @staticmethod
    def of(w: GqaWeights, limits: Limits, attention: StreamedAttention | None) -> GqaKernels:
        """Norms over all heads read q and k before they are stored: as tensors."""
        assert isinstance(w.qkv, TorchLinear) and isinstance(w.out, TorchLinear)
        most = limits.qkv if w.q_norm is None else 0
        return GqaKernels(
            streamed_product(w.qkv.weight, most, w.qkv.bias),
            streamed_product(w.out.weight, limits.out, w.out.bias),
            attention,
        )


def gqa(
    x: torch.Tensor, w: GqaWeights, by: GqaKernels, spec: GqaSpec, kv: PagedKv, at: AttentionStep
) -> torch.Tensor | Partial:
    """Grouped-query attention of x: [T, H], normed, to [T, H]; stores the tokens' K and V."""
    streamed = at.streamed if by.attention is not None else None
    whole = streamed is None or streamed.count == len(x)  # partial sums are read by one kernel
    qkv = product(x, by.qkv if whole else None, w.qkv)
    if isinstance(qkv, torch.Tensor):
        _norm_all_heads(qkv, w, spec, at.eps)
    norm = None if w.head_norm is None else HeadNorm(w.head_norm, at.eps)
    rule, out = AttentionRule(spec.scale, spec.window), x.new_empty(len(x), spec.heads, spec.head_dim)
    done = 0  # rows
    if by.attention is not None and streamed is not None:
        done = streamed.count
        by.attention.run(qkv if isinstance(qkv, Partial) else qkv[:done], streamed, out[:done])
    if done < len(x):
        q = torch.empty_like(out[done:])
        rest = qkv if isinstance(qkv, Partial) else qkv[done:]
        store_gqa(rest, q, kv, at.rotation.behind(done), norm, spec.clip)
        attend(q, kv, rule, at, out[done:])
    return product(out.flatten(1), by.out, w.out)


def _norm_all_heads(qkv: torch.Tensor, w: GqaWeights, spec: GqaSpec, eps: float) -> None:
    if w.q_norm is None or w.k_norm is None:
        return
    q_width, k_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    for weight, part in ((w.q_norm, qkv[:, :q_width]), (w.k_norm, qkv[:, q_width : q_width + k_width])):
        rms_norm(part, weight, eps, part)


def mla(x: torch.Tensor, w: MlaWeights, spec: MlaSpec, kv: PagedKv, at: AttentionStep) -> torch.Tensor:
    """Latent attention of x: [T, H], normed, to [T, H], absorbed; stores the tokens' latents."""
    down = w.down(x)
    q_width = down.shape[1] - spec.kv_lora - spec.rope_dim
    q, latent, k_rope = torch.split(down, [q_width, spec.kv_lora, spec.rope_dim], dim=1)
    if w.q_up is not None and w.q_norm is not None:
        normed = torch.empty_like(q)
        rms_norm(q, w.q_norm, spec.norm_eps, normed)
        q = w.q_up(normed)
    q = q.view(len(x), spec.heads, spec.nope_dim + spec.rope_dim)
    query = x.new_empty(len(x), spec.heads, spec.kv_lora + spec.rope_dim)
    by_head = query[..., : spec.kv_lora].transpose(0, 1)
    torch.bmm(q[..., : spec.nope_dim].transpose(0, 1), w.k_up, out=by_head)
    given = MlaInput(latent, k_rope, q[..., spec.nope_dim :], w.kv_norm, spec.norm_eps)
    store_mla(given, query[..., spec.kv_lora :], kv, at.rotation)
    latents = x.new_empty(len(x), spec.heads, spec.kv_lora)
    attend(query, kv, AttentionRule(spec.scale), at, latents)
    out = x.new_empty(len(x), spec.heads, w.v_up.shape[2])
    torch.bmm(latents.transpose(0, 1), w.v_up, out=out.transpose(0, 1))
    return w.out(out.flatten(1))


def attend(q: torch.Tensor, kv: PagedKv, rule: AttentionRule, at: AttentionStep, out: torch.Tensor) -> None:
    """Softmax attention of q: [.., heads, k_dim] to out: [.., heads, v_dim]: single tokens, then chunks.

    q: of all rows of the step, or of those behind its single tokens alone.
    """
    step, count = at.step, at.step.decode
    singles = count if len(q) == step.tokens else 0
    if len(q) == step.tokens:
        at.decode(q[:singles], kv, rule, out[:singles])
    if len(step.lengths) > count:
        chunks = Sequences(step.blocks[count:], step.lengths[count:])
        prefill(q[singles:], step.query_start, kv, chunks, rule, out[singles:])
