"""[6] The layer loop. A forward pass is a generator that pauses at every hook of the exchange.

One micro-batch runs attention + router + dispatch_send | dispatch_recv + experts + combine_send |
combine_recv + the next layer's attention ...; `|` is a yield. `interleave` alternates several, which hides
the communication of each behind the computation of the others, without threads.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ep_server.errors import InternalError
from ep_server.exchange.api import Exchange
from ep_server.models.attention import AttentionInput, gqa, mla, rotation_table
from ep_server.models.batch import MicroBatch
from ep_server.models.compute import Compute
from ep_server.models.families.spec import GqaSpec, ModelSpec
from ep_server.models.kv_cache import KvCache, KvLayer
from ep_server.models.layers import GqaWeights, LayerWeights, MlaWeights, ModelWeights, MoeWeights
from ep_server.models.moe import ExpertCounter, MoeContext, UniformRouting, dense_ffn, moe
from ep_server.models.slots import SlotTable
from ep_server.models.timers import Phase, PhaseClock

Forward = Generator[None, None, torch.Tensor]


@dataclass(frozen=True, slots=True)
class DecoderParams:
    """What a decoder is made of. max_context: longest sequence, tokens; sizes the rope table.

    uniform: draws experts in place of the router. slots: see MoeContext.
    """

    spec: ModelSpec
    weights: ModelWeights
    exchange: Exchange
    kv_cache: KvCache
    max_context: int
    compute: Compute
    uniform: UniformRouting | None = None
    slots: SlotTable | None = None


class Decoder:
    """A model on one rank: token ids in, hidden states of the rows that are sampled out."""

    def __init__(self, params: DecoderParams, clock: PhaseClock) -> None:
        self._spec, self._weights, self._kv = params.spec, params.weights, params.kv_cache
        self._clock, self._compute = clock, params.compute
        self._rotations = rotation_table(params.spec.rope, params.max_context).to(params.compute.device)
        local = len(params.exchange.spec.local_experts)
        self.experts = ExpertCounter(params.spec.num_layers, local, params.compute.device)
        self._uniform = params.uniform
        self._moe = self._contexts(params, params.exchange)
        many = params.exchange.normal
        self._moe_normal = None if many is None else self._contexts(params, many)

    def _contexts(self, params: DecoderParams, exchange: Exchange) -> list[MoeContext]:
        """One per layer."""
        router, clock = params.spec.router, self._clock
        return [
            MoeContext(index, router, exchange, clock, row, params.uniform, params.slots)
            for index, row in enumerate(self.experts.rows)
        ]

    def forward(self, batch: MicroBatch, *, normal: bool = False) -> Forward:
        """Runs all layers. Returns float32 logits [number of sampled rows, V].

        normal: with the exchange of many rows. Raises InternalError if there is none.
        Yields twice per sparse layer, also with no tokens: the exchange is collective.
        """
        eps, norm = self._spec.norm_eps, self._compute.rms_norm
        at = self._attention_input(batch)
        tokens = self._identities(batch)
        x = F.embedding(batch.token_ids, self._weights.embedding)
        moes = self._moe_normal if normal else self._moe
        if moes is None:
            raise InternalError("this rank has no exchange of many rows")
        layers = zip(self._weights.layers, self._kv.layers, moes, strict=True)
        for index, (layer, kv, context) in enumerate(layers):
            if len(x):
                x = x + self._attention(norm(x, layer.attention_norm, eps), layer, kv, at)
            self._kv.progress.written(index)
            h = norm(x, layer.ffn_norm, eps)
            self._clock.lap(Phase.ATTENTION)
            if isinstance(layer.ffn, MoeWeights):
                x = x + (yield from moe(h, layer.ffn, context, tokens))
            else:
                x = x + dense_ffn(h, layer.ffn)
                self._clock.lap(Phase.EXPERTS)
        if batch.scorer is not None:
            batch.scorer.score(lambda rows: self._logits(x[rows]), self._compute.device)
        return self._logits(x[batch.sample_rows])

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        normed = self._compute.rms_norm(x, self._weights.norm, self._spec.norm_eps)
        return self._weights.head.unrounded(normed)

    def _attention(
        self, x: torch.Tensor, layer: LayerWeights, kv: KvLayer, at: AttentionInput
    ) -> torch.Tensor:
        spec, w = self._spec.attention, layer.attention
        if isinstance(spec, GqaSpec):
            assert isinstance(w, GqaWeights)
            return gqa(x, w, spec, kv, at)
        assert isinstance(w, MlaWeights)
        return mla(x, w, spec, kv, at)

    def _identities(self, batch: MicroBatch) -> torch.Tensor | None:
        """What uniform routing knows the tokens by; None where the router is asked."""
        if self._uniform is None:
            return None
        return self._uniform.identify(batch.row_numbers(), batch.attention.positions)

    def _attention_input(self, batch: MicroBatch) -> AttentionInput:
        spec, meta = self._spec.attention, batch.attention
        window = spec.window if isinstance(spec, GqaSpec) else 0
        attend = self._compute.attend(meta, window, self._weights.norm.dtype)
        return AttentionInput(
            meta, attend, self._compute, self._rotations[meta.positions][:, None], self._spec.norm_eps
        )


def interleave(forwards: Sequence[Forward]) -> list[torch.Tensor]:
    """Runs forward passes hook by hook in turn: each stage of the first comes before that of the second.

    The order depends on the number of passes and layers alone, so it is the same on every rank.
    """
    results: dict[int, torch.Tensor] = {}
    while len(results) < len(forwards):
        for index, forward in enumerate(forwards):
            if index not in results:
                try:
                    next(forward)
                except StopIteration as stop:
                    results[index] = stop.value
    return [results[index] for index in range(len(forwards))]
