"""[6] The layer loop of a GPU: the passes of model/decoder.py on fused kernels, without a word from the host.

All that differs from step to step lies in device memory at fixed addresses, so a pass over a padded bucket
can be captured in a graph and replayed. A pass is a generator that pauses at every hook of the exchange.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ep_server.ep.exchange import PendingDispatch, Received
from ep_server.model.decoder import DecoderParams, Forward
from ep_server.model.experts import ExpertCounter
from ep_server.model.families.spec import GqaSpec
from ep_server.model.gpu.attention import AttentionStep, gqa, mla
from ep_server.model.gpu.moe import GpuMoe, MoeStep, dense, moe
from ep_server.model.gpu.step_input import StepTensors
from ep_server.model.layers import GqaWeights, LayerWeights, MlaWeights, MoeWeights
from ep_server.model.rope import rotation_table
from ep_server.model.triton.norm import add_rms_norm, rms_norm
from ep_server.model.triton.paged import PagedKv
from ep_server.model.triton.paged_decode import Workspace, splits_for
from ep_server.model.triton.rope import Rotation


class GpuDecoder:
    """A model on one GPU: rows in, float32 logits of the sampled rows out.

    Args:
        params: weights prepared by TorchCompute on the device.
        receive: see GpuMoe.
    """

    def __init__(self, params: DecoderParams, receive: Callable[[PendingDispatch, int], Received]) -> None:
        self._spec, self._weights, self._uniform = params.spec, params.weights, params.uniform
        device = params.compute.device
        self._kv = [PagedKv(layer) for layer in params.kv_cache.layers]
        table = rotation_table(params.spec.rope, params.max_context)
        self._table = torch.view_as_real(table).contiguous().to(device)
        self._processors = _multiprocessors(device)
        local = len(params.exchange.spec.local_experts)
        self.experts = ExpertCounter(params.spec.num_layers, local, device)
        self._moe = [
            GpuMoe(index, params.spec.router, params.exchange, receive, row, params.uniform)
            for index, row in enumerate(self.experts.rows)
        ]

    def forward(self, step: StepTensors, drawn: torch.Tensor, most: int) -> Forward:
        """Runs all layers. Returns float32 logits [number of sampled rows, V].

        Args:
            drawn: [..] int64, tokens that the last step drew, by `step.sources`.
            most: rows that the step has at most on any rank.
        Yields twice per sparse layer, also with no rows: the exchange is collective.
        """
        eps, weights = self._spec.norm_eps, self._weights
        at, routed = self._attention_step(step), self._moe_step(step, most)
        residual = F.embedding(_token_ids(step, drawn), weights.embedding)
        x = torch.empty_like(residual)
        rms_norm(residual, weights.layers[0].attention_norm, eps, x)
        norms = [*(layer.attention_norm for layer in weights.layers[1:]), weights.norm]
        for index, (layer, after) in enumerate(zip(weights.layers, norms, strict=True)):
            if step.tokens:
                x = self._attention(x, layer, self._kv[index], at)
            add_rms_norm(x, residual, layer.ffn_norm, eps, x)
            if isinstance(layer.ffn, MoeWeights):
                x = yield from moe(x, layer.ffn, self._moe[index], routed)
            else:
                x = dense(x, layer.ffn)
            add_rms_norm(x, residual, after, eps, x)
        if step.sample_rows is not None:
            x = x.index_select(0, step.sample_rows)
        return weights.head.unrounded(x)

    def _attention(
        self, x: torch.Tensor, layer: LayerWeights, kv: PagedKv, at: AttentionStep
    ) -> torch.Tensor:
        spec, w = self._spec.attention, layer.attention
        if isinstance(spec, GqaSpec):
            assert isinstance(w, GqaWeights)
            return gqa(x, w, spec, kv, at)
        assert isinstance(w, MlaWeights)
        return mla(x, w, spec, kv, at)

    def _attention_step(self, step: StepTensors) -> AttentionStep:
        spec, eps = self._spec.attention, self._spec.norm_eps
        v_dim = spec.head_dim if isinstance(spec, GqaSpec) else spec.kv_lora
        splits = splits_for(step.decode, self._kv[0].kv_heads, self._processors, len(self._table))
        workspace = Workspace.of(step.decode, spec.heads, splits, v_dim, self._table.device)
        rotation = Rotation(self._table, step.positions, step.slots)
        return AttentionStep(step, rotation, workspace, eps)

    def _moe_step(self, step: StepTensors, most: int) -> MoeStep:
        tokens = None
        if self._uniform is not None:
            tokens = self._uniform.identify(step.numbers.long(), step.positions.long())
        return MoeStep(step.live, tokens, most)


def _token_ids(step: StepTensors, drawn: torch.Tensor) -> torch.Tensor:
    """[T]: what was given, or what the last step drew."""
    last = drawn.index_select(0, step.sources.clamp(min=0)).clamp(min=0)  # one that failed draws NO_TOKEN
    return torch.where(step.sources < 0, step.ids, last.to(step.ids.dtype))


def _multiprocessors(device: torch.device) -> int:
    """Of a GPU; 0 where kernels are interpreted."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
