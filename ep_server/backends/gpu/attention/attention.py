"""[6] Attention of one layer: projections by torch or our kernels, and fused kernels around them.

Reads and writes the paged cache in place. Weights are those of models/layers.py, prepared by TorchCompute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ep_server.backends.gpu.attention.decode_kernels import DecodeLayer
from ep_server.backends.gpu.attention.expanded import ExpandedPrefill
from ep_server.backends.gpu.attention.widened import WidenedPrefill
from ep_server.backends.gpu.kernels.hopper.attention import HopperAttention, HopperAttentionStep
from ep_server.backends.gpu.kernels.hopper.mla import HopperMla, HopperMlaStep
from ep_server.backends.gpu.kernels.hopper.prefill import HopperPrefill
from ep_server.backends.gpu.kernels.hopper.products import HopperProduct, Limits, hopper_product, product
from ep_server.backends.gpu.kernels.triton.norm import rms_norm
from ep_server.backends.gpu.kernels.triton.paged import AttentionRule, PagedKv, Sequences
from ep_server.backends.gpu.kernels.triton.paged_prefill import prefill
from ep_server.backends.gpu.kernels.triton.partial import Partial
from ep_server.backends.gpu.kernels.triton.rope import HeadNorm, MlaInput, Rotation, store_gqa, store_mla
from ep_server.backends.gpu.step_input import StepTensors
from ep_server.backends.torch_compute import TorchHeadLinear, TorchLinear
from ep_server.models.families.spec import GqaSpec, MlaSpec
from ep_server.models.layers import GqaWeights, MlaWeights


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The attention state that all layers of a step share. decode: for the first `step.singles` sequences.

    hopper, latent: state for its single tokens, used by layers that have a Hopper kernel.
    """

    step: StepTensors
    rotation: Rotation
    decode: DecodeLayer
    eps: float
    hopper: HopperAttentionStep | None = None
    latent: HopperMlaStep | None = None


@dataclass(frozen=True, slots=True)
class GqaKernels:
    """A layer's Hopper kernels: projections of few rows, all between them, and attention of chunks.

    widened: attention of chunks over an FP8 cache, in steps that have a copy of its blocks.
    """

    qkv: HopperProduct | None = None
    out: HopperProduct | None = None
    attention: HopperAttention | None = None
    prefill: HopperPrefill | None = None
    widened: WidenedPrefill | None = None

    @staticmethod
    def of(
        w: GqaWeights,
        limits: Limits,
        attention: HopperAttention | None,
        prefill: HopperPrefill | None = None,
        widened: WidenedPrefill | None = None,
    ) -> GqaKernels:
        """Norms over all heads read q and k before they are stored: as tensors."""
        assert isinstance(w.qkv, TorchLinear) and isinstance(w.out, TorchLinear)
        most = limits.qkv if w.q_norm is None else 0
        return GqaKernels(
            hopper_product(w.qkv.weight, most, w.qkv.bias),
            hopper_product(w.out.weight, limits.out, w.out.bias),
            attention,
            prefill,
            widened,
        )


@dataclass(frozen=True, slots=True)
class MlaKernels:
    """A layer's Hopper kernels for latent attention: of single tokens, and of chunks on expanded latents."""

    singles: HopperMla | None = None
    expanded: ExpandedPrefill | None = None


def gqa(
    x: torch.Tensor, w: GqaWeights, by: GqaKernels, spec: GqaSpec, kv: PagedKv, at: AttentionStep
) -> torch.Tensor | Partial:
    """Grouped-query attention of x: [T, H], normed, to [T, H]; stores the tokens' K and V."""
    hopper, chunks = at.hopper if by.attention is not None else None, at.step.chunks
    one = hopper is None or chunks is None  # kernel reads the projections: they may be partial sums
    qkv = product(x, by.qkv if one else None, w.qkv)
    if isinstance(qkv, torch.Tensor):
        _norm_all_heads(qkv, w, spec, at.eps)
    norm = None if w.head_norm is None else HeadNorm(w.head_norm, at.eps)
    rule, out = AttentionRule(spec.scale, spec.window), answers(x, spec.heads, spec.head_dim, at.step)
    if by.attention is None or hopper is None:
        q = torch.empty_like(out)
        store_gqa(qkv, q, kv, at.rotation, norm, spec.clip)
        attend(q, kv, rule, at, out, by)
        return product(out.flatten(1), by.out, w.out)
    singles = hopper.count
    by.attention.run(qkv if isinstance(qkv, Partial) else qkv[:singles], hopper, out[:singles])
    if chunks is not None:
        q = torch.empty_like(out)
        store_gqa(qkv, q, kv, replace(at.rotation, slots=chunks.slots), norm, spec.clip)
        attend_chunks(q, kv, rule, at, out, by)
    return product(out.flatten(1), by.out, w.out)


def _norm_all_heads(qkv: torch.Tensor, w: GqaWeights, spec: GqaSpec, eps: float) -> None:
    if w.q_norm is None or w.k_norm is None:
        return
    q_width, k_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    for weight, part in ((w.q_norm, qkv[:, :q_width]), (w.k_norm, qkv[:, q_width : q_width + k_width])):
        rms_norm(part, weight, eps, part)


def mla(
    x: torch.Tensor,
    w: MlaWeights,
    by: MlaKernels,
    spec: MlaSpec,
    kv: PagedKv,
    at: AttentionStep,
) -> torch.Tensor:
    """Latent attention of x: [T, H], normed, to [T, H]; stores the tokens' latents.

    Absorbed, but for chunks in steps that have a copy of the latents to expand.
    """
    down = w.down(x)
    q_width = down.shape[1] - spec.kv_lora - spec.rope_dim
    q, latent, k_rope = torch.split(down, [q_width, spec.kv_lora, spec.rope_dim], dim=1)
    if w.q_up is not None and w.q_norm is not None:
        normed = torch.empty_like(q)
        rms_norm(q, w.q_norm, spec.norm_eps, normed)
        q = w.q_up(normed)
    q = q.view(len(x), spec.heads, spec.nope_dim + spec.rope_dim)
    q_rope = q[..., spec.nope_dim :]
    given = MlaInput(latent, k_rope, q_rope, w.kv_norm, spec.norm_eps)
    k_up, v_up = w.k_up, w.v_up
    assert isinstance(k_up, TorchHeadLinear) and isinstance(v_up, TorchHeadLinear)
    up, chunks, rule = (k_up.weight, v_up.weight), at.step.chunks, AttentionRule(spec.scale)
    if by.expanded is not None and chunks is not None and chunks.copied is not None:
        store_mla(given, q_rope, kv, at.rotation)
        out = answers(x, spec.heads, spec.v_dim, at.step)
        singles = len(at.step.singles)
        if singles:
            query = _absorbed(q[:singles], up[0])
            query[..., spec.kv_lora :] = q_rope[:singles]
            latents = x.new_empty(singles, spec.heads, spec.kv_lora)
            _attend_singles(query, kv, rule, by.singles, at, latents)
            torch.bmm(latents.transpose(0, 1), up[1], out=out[:singles].transpose(0, 1))
        by.expanded.run(q, chunks.query_start, kv, up, chunks.copied, at.step.lengths, out)
    else:
        query = _absorbed(q, up[0])
        store_mla(given, query[..., spec.kv_lora :], kv, at.rotation)
        latents = answers(x, spec.heads, spec.kv_lora, at.step)
        _attend_singles(query, kv, rule, by.singles, at, latents)
        attend_chunks(query, kv, rule, at, latents)
        out = x.new_empty(len(x), spec.heads, spec.v_dim)
        torch.bmm(latents.transpose(0, 1), up[1], out=out.transpose(0, 1))
    return w.out(out.flatten(1))


def _absorbed(q: torch.Tensor, k_up: torch.Tensor) -> torch.Tensor:
    """Queries [T, heads, kv_lora + rope_dim] in the latent space; the rotary channels are not written."""
    heads, nope, latent = k_up.shape
    query = q.new_empty(len(q), heads, latent + q.shape[2] - nope)
    torch.bmm(q[..., :nope].transpose(0, 1), k_up, out=query[..., :latent].transpose(0, 1))
    return query


def _attend_singles(
    query: torch.Tensor,
    kv: PagedKv,
    rule: AttentionRule,
    by: HopperMla | None,
    at: AttentionStep,
    out: torch.Tensor,
) -> None:
    """The rows of single tokens, absorbed, by the layer's Hopper kernel if it has one."""
    count, step = len(at.step.singles), at.latent
    if by is None or step is None:
        at.decode(query[:count], kv, rule, out[:count])
    else:
        by.run(query[:count], step, out[:count])


def answers(x: torch.Tensor, heads: int, channels: int, step: StepTensors) -> torch.Tensor:
    """[T, heads, channels] for attention to write. With prompt chunks, no kernel writes padded rows."""
    shape, chunks = (len(x), heads, channels), step.chunks
    return x.new_empty(shape) if chunks is None or not chunks.padded else x.new_zeros(shape)


def attend(
    q: torch.Tensor,
    kv: PagedKv,
    rule: AttentionRule,
    at: AttentionStep,
    out: torch.Tensor,
    by: GqaKernels | None = None,
) -> None:
    """Softmax attention of q: [T, heads, k_dim] to out: [T, heads, v_dim]: single tokens, then chunks.

    In a captured step, the kernel for single tokens also writes rows of chunks. These are then overwritten.
    by: the layer's kernels, of which those for chunks are used.
    """
    singles = len(at.step.singles)
    at.decode(q[:singles], kv, rule, out[:singles])
    attend_chunks(q, kv, rule, at, out, by)


def attend_chunks(
    q: torch.Tensor,
    kv: PagedKv,
    rule: AttentionRule,
    at: AttentionStep,
    out: torch.Tensor,
    by: GqaKernels | None = None,
) -> None:
    """As attend(), but for the rows of chunks only. Does not read or write other rows."""
    step, chunks = at.step, at.step.chunks
    if chunks is None:
        return
    sequences = Sequences(step.blocks, step.lengths)
    if by is not None and by.prefill is not None:
        by.prefill.run(q, chunks.query_start, sequences, out)
    elif by is not None and by.widened is not None and chunks.copied is not None:
        by.widened.run(q, chunks.query_start, kv, chunks.copied, step.lengths, out)
    else:
        prefill(q, chunks.query_start, kv, sequences, rule, out)
