"""[6] The layer loop on a GPU: as models/decoder.py, on fused kernels and without the host.

Everything that differs between steps is in device memory at fixed addresses. So a pass over a padded bucket
can be captured in a graph and replayed. A pass is a generator that pauses at every hook of the exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ep_server.backends.gpu.attention.attention import AttentionStep, GqaKernels, MlaKernels, gqa, mla
from ep_server.backends.gpu.attention.decode_kernels import DecodeKernels, TritonDecode, triton_decode
from ep_server.backends.gpu.attention.expanded import ExpandedPrefill
from ep_server.backends.gpu.attention.widened import WidenedPrefill
from ep_server.backends.gpu.capability import sm_count
from ep_server.backends.gpu.chunk_copies import CopyRule
from ep_server.backends.gpu.expansion import Expansion
from ep_server.backends.gpu.kernels.hopper.attention import (
    HopperAttentionStep,
    hopper_attention,
    launch_config_for,
)
from ep_server.backends.gpu.kernels.hopper.mla import (
    HopperMlaStep,
    hopper_mla,
    mla_launch_config_for,
)
from ep_server.backends.gpu.kernels.hopper.prefill import hopper_prefill, prefill_scratch
from ep_server.backends.gpu.kernels.hopper.products import (
    HOPPER_LIMITS,
    HOPPER_LIMITS_AMONG_RANKS,
    hopper_product,
)
from ep_server.backends.gpu.kernels.triton.embedding import RowTokens, embed
from ep_server.backends.gpu.kernels.triton.expert_rows import tally
from ep_server.backends.gpu.kernels.triton.paged import PagedKv, Sequences
from ep_server.backends.gpu.kernels.triton.partial import Partial
from ep_server.backends.gpu.kernels.triton.rope import HeadNorm, Rotation
from ep_server.backends.gpu.moe.moe import (
    Branch,
    GpuMoe,
    GpuRouter,
    MoeStep,
    add_norm,
    dense,
    hopper_experts,
    moe,
    router_weight,
)
from ep_server.backends.gpu.moe.rows import DeferredCombine, Rows
from ep_server.backends.gpu.side_stream import SideStream
from ep_server.backends.gpu.step_input import StepTensors
from ep_server.backends.gpu.widening import Widening
from ep_server.backends.torch_compute import TorchLinear
from ep_server.models.attention import rotation_table
from ep_server.models.decoder import DecoderParams, Forward
from ep_server.models.families.spec import GqaSpec, MlaSpec
from ep_server.models.layers import GqaWeights, KvScales, MlaWeights, MoeWeights
from ep_server.models.moe import ExpertCounter
from ep_server.models.prompt_scorer import PromptScorer
from ep_server.models.timers import Lap, Phase


@dataclass(frozen=True, slots=True)
class Pass:
    """The state that the micro-batches of a step share.

    drawn: [..] int64, tokens drawn by the last step; StepTensors.sources indexes them.
    most: the largest micro-batch on any rank, in rows. rows: how they are sent. lap: ends a phase.
    side: where shared experts may run concurrently; None = on the step's own stream.
    counted: the cache's progress counts the layers whose keys and values are written.
    """

    drawn: torch.Tensor
    most: int
    rows: Rows
    lap: Lap
    side: SideStream | None = None
    counted: bool = False


class GpuDecoder:
    """A model on one GPU: rows in, hidden states of the sampled rows out, and their logits.

    Args:
        params: weights prepared by TorchCompute on the device.
        kernels: of attention with one token per sequence; Triton's if None.
        copies: of steps whose chunks attend to a copy: a Widening or an Expansion; None = there are none.
    """

    def __init__(
        self,
        params: DecoderParams,
        kernels: DecodeKernels | None = None,
        copies: CopyRule | None = None,
    ) -> None:
        self._spec, self._weights = params.spec, params.weights
        device = params.compute.device
        self._kv, self._progress = paged_layers(params), params.kv_cache.progress
        table = rotation_table(params.spec.rope, params.max_context)
        self._table = torch.view_as_real(table).contiguous().to(device)
        attention, longest = params.spec.attention, len(table)
        self._kernels = kernels or triton_decode(attention, longest, sm_count(device))
        self._limits = HOPPER_LIMITS if params.exchange.spec.num_ranks == 1 else HOPPER_LIMITS_AMONG_RANKS
        local = len(params.exchange.spec.local_experts)
        self.experts = ExpertCounter(params.spec.num_layers, local, device, torch.int32, tally)
        self._moe = [self._block(index, params) for index in range(params.spec.num_layers)]
        self._scratch = prefill_scratch(device)
        self._widened: WidenedPrefill | None = None
        self._expanded: ExpandedPrefill | None = None
        if isinstance(copies, Expansion):
            dtype = params.weights.embedding.dtype
            self._expanded = ExpandedPrefill(copies, dtype, device, self._scratch)
        elif copies is not None:
            assert isinstance(copies, Widening) and isinstance(attention, GqaSpec)
            self._widened = WidenedPrefill(attention, copies, device, self._scratch)
        self._by = [self._layer_kernels(index) for index in range(params.spec.num_layers)]

    def forward(self, step: StepTensors, on: Pass, scorer: PromptScorer | None = None) -> Forward:
        """Runs all layers. Returns [number of sampled rows, H], normed.

        `scorer` scores prompt tokens; a captured pass has none.
        Yields twice per sparse layer, also with no rows: the exchange is collective.
        """
        eps, weights = self._spec.norm_eps, self._weights
        at = self._attention_step(step)
        routed = MoeStep(step, on.most, on.rows, on.lap, on.side)
        residual, x = (weights.embedding.new_empty(step.tokens, self._spec.hidden) for _ in range(2))
        tokens = RowTokens(step.ids, step.sources, on.drawn)
        embed(tokens, weights.embedding, weights.layers[0].attention_norm, eps, residual, x)
        norms = [*(layer.attention_norm for layer in weights.layers[1:]), weights.norm]
        for index, (layer, after) in enumerate(zip(weights.layers, norms, strict=True)):
            branch: Branch = self._attention(x, index, at) if step.tokens else x
            if on.counted:
                self._progress.written(index)
            block = self._moe[index]
            x = add_norm(branch, residual, layer.ffn_norm, eps)
            on.lap(Phase.ATTENTION)
            if isinstance(layer.ffn, MoeWeights):
                assert block is not None
                branch = yield from moe(x, layer.ffn, block, routed)
            else:
                branch = dense(x, layer.ffn)
                on.lap(Phase.EXPERTS)
            x = add_norm(branch, residual, after, eps)
            if isinstance(branch, DeferredCombine):
                on.lap(Phase.COMBINE)
                branch = x  # frees the experts' rows before attention allocates memory
        if scorer is not None:
            scorer.score(lambda rows: weights.head.unrounded(x.index_select(0, rows)), x.device)
        return x if step.sample_rows is None else x.index_select(0, step.sample_rows)

    def logits(self, hidden: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """[N, V] of the rows of all micro-batches: the first N of out, [.., V] float32."""
        head, x = self._weights.head, hidden[0] if len(hidden) == 1 else torch.cat(list(hidden))
        assert isinstance(head, TorchLinear)
        logits = out[: len(x)]
        head.write_unrounded(x, logits)
        return logits

    def renew_routers(self) -> None:
        """The weights have new values in place; so have what router_weight() made of them."""
        for layer, block in zip(self._weights.layers, self._moe, strict=True):
            if block is not None and isinstance(layer.ffn, MoeWeights):
                assert isinstance(layer.ffn.router, TorchLinear)
                block.router.weight.copy_(layer.ffn.router.weight)

    def _block(self, index: int, params: DecoderParams) -> GpuMoe | None:
        ffn = params.weights.layers[index].ffn
        if not isinstance(ffn, MoeWeights):
            return None
        assert isinstance(ffn.router, TorchLinear)
        weight = router_weight(ffn.router.weight, params.weights.embedding.dtype)
        router = GpuRouter(
            index,
            params.spec.router,
            weight,
            ffn.bias,
            hopper_product(weight, self._limits.router),
            params.uniform,
            None if params.slots is None else params.slots.slots[index],
        )
        experts = hopper_experts(ffn.experts)
        return GpuMoe(router, params.exchange.spec, self.experts.rows[index], experts)

    def _attention(self, x: torch.Tensor, index: int, at: AttentionStep) -> torch.Tensor | Partial:
        spec, w, kv = self._spec.attention, self._weights.layers[index].attention, self._kv[index]
        by = self._by[index]
        if isinstance(spec, GqaSpec):
            assert isinstance(w, GqaWeights) and isinstance(by, GqaKernels)
            return gqa(x, w, by, spec, kv, at)
        assert isinstance(w, MlaWeights) and isinstance(by, MlaKernels)
        return mla(x, w, by, spec, kv, at)

    def _layer_kernels(self, index: int) -> GqaKernels | MlaKernels:
        spec, w, kv = self._spec.attention, self._weights.layers[index].attention, self._kv[index]
        ours = isinstance(self._kernels, TritonDecode) and self._kernels.hopper
        if isinstance(spec, MlaSpec):
            return MlaKernels(hopper_mla(kv, spec) if ours else None, self._expanded)
        assert isinstance(w, GqaWeights)
        norm = None if w.head_norm is None else HeadNorm(w.head_norm, self._spec.norm_eps)
        hopper = hopper_attention(kv, spec, self._table, norm) if ours else None
        prefill = hopper_prefill(kv, spec, self._scratch) if ours else None
        return GqaKernels.of(w, self._limits, hopper, prefill, self._widened)

    def _attention_step(self, step: StepTensors) -> AttentionStep:
        singles = Sequences(step.blocks[: len(step.singles)], step.singles.lengths)
        rotation = Rotation(self._table, step.positions, step.slots)
        kernels, eps = self._kernels.over(singles), self._spec.norm_eps
        return AttentionStep(step, rotation, kernels, eps, self._hopper(step), self._latent(step))

    def _hopper(self, step: StepTensors) -> HopperAttentionStep | None:
        spec, kernels = self._spec.attention, self._kernels
        wanted = any(isinstance(by, GqaKernels) and by.attention is not None for by in self._by)
        if not wanted or not len(step.singles):
            return None
        assert isinstance(spec, GqaSpec) and isinstance(kernels, TritonDecode)
        sizes = len(step.singles), spec.kv_heads, kernels.num_sms
        config = launch_config_for(*sizes, mixed=step.chunks is not None)
        return HopperAttentionStep(step, spec, config)

    def _latent(self, step: StepTensors) -> HopperMlaStep | None:
        spec, kernels, count = self._spec.attention, self._kernels, len(step.singles)
        wanted = any(isinstance(by, MlaKernels) and by.singles is not None for by in self._by)
        if not wanted or not count:
            return None
        assert isinstance(spec, MlaSpec) and isinstance(kernels, TritonDecode)
        config = mla_launch_config_for(count, spec.heads, kernels.num_sms, kernels.longest)
        return HopperMlaStep(step, spec.heads, config)


def paged_layers(params: DecoderParams) -> list[PagedKv]:
    """One per layer. Scales are the checkpoint's, or 1. Raises: InternalError for a cache of other dtypes."""
    layers = []
    for cached, weights in zip(params.kv_cache.layers, params.weights.layers, strict=True):
        kv = PagedKv(cached)
        if kv.fp8:
            scales = weights.kv_scales or KvScales.ones(params.spec.attention, params.compute.device)
            kv = PagedKv(cached, scales.k, scales.v)
        kv.check()
        layers.append(kv)
    return layers
