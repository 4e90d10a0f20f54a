"""Runs step batches on one rank: micro-batches through the decoder, logits through the sampler.

Holds the sampler state of the rank's requests and the step timers. The caller provides torch.inference_mode
and the number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from ep_server.backends.masks import PATIENCE_SECONDS, Masks, NoMasks
from ep_server.errors import InternalError
from ep_server.models.batch import split
from ep_server.models.decoder import Decoder, DecoderParams, interleave
from ep_server.models.kv_cache import KvCache
from ep_server.models.slots import ExpertRows, Held, Routes
from ep_server.models.timers import Phase, PhaseClock, moe_counters
from ep_server.records import LATE_TOKEN, PromptLogprobs, Request, SampledToken, StepBatch


class TokenSampler(Protocol):
    """Draws tokens; holds one generator and the penalty counts per request."""

    def add(self, request: Request, output: Sequence[int] = ()) -> None:
        """A request joins."""
        ...

    def remove(self, number: int) -> None:
        """A request left."""
        ...

    def sample(
        self, numbers: Sequence[int], logits: torch.Tensor, masks: Mapping[int, np.ndarray] | None = None
    ) -> list[SampledToken]:
        """One token per row of logits: [N, V] float32, which it may overwrite. masks: see Masks.mask()."""
        ...


@dataclass(frozen=True, slots=True)
class RunnerStatistics:
    """Cumulative measurements under the names of RankStatistics. experts_move: see ranks.statistics."""

    histograms: dict[str, tuple[int, ...]]
    sums: dict[str, int]
    expert_tokens: dict[int, int]
    counters: dict[str, int] = field(default_factory=dict)
    experts_move: bool = False


@dataclass(frozen=True, slots=True)
class _Ran:
    """A step that ran."""

    tokens: list[SampledToken]
    prompt_logprobs: list[PromptLogprobs]


class ModelRunner:
    """The model of one rank."""

    def __init__(self, params: DecoderParams, sampler: TokenSampler, masks: Masks | None = None) -> None:
        """masks: of the requests that have a grammar."""
        self._params, self._sampler = params, sampler
        self._masks = NoMasks() if masks is None else masks
        self._clock = PhaseClock()
        self._decoder = Decoder(params, self._clock)
        self._rows: ExpertRows | None = None  # once place() was called

    @property
    def kv_cache(self) -> KvCache:
        """The cache that steps read and write."""
        return self._params.kv_cache

    def add(self, request: Request) -> None:
        """Creates the sampler state of a request, before its first token is sampled."""
        self._sampler.add(request, request.output_ids)

    def remove(self, number: int) -> None:
        """Drops the sampler state of a request."""
        self._sampler.remove(number)

    def bucket_of(self, batch: StepBatch) -> int:
        """0: a step on the CPU has the rows that it has."""
        return 0

    def micro_batches_of(self, bucket: int, agreed: int) -> int:
        """As agreed: any step can be cut."""
        return agreed

    def collect(self, launched: _Ran) -> list[SampledToken]:
        """One token per slice that samples, in the order the slices have in the batch."""
        return launched.tokens

    def complete(self, launched: _Ran) -> list[int]:
        """The requests whose masks were late."""
        return [token.number for token in launched.tokens if token.token_id == LATE_TOKEN]

    def prompt_logprobs(self, launched: _Ran) -> Sequence[PromptLogprobs]:
        """Of the slices with `scored` rows."""
        return launched.prompt_logprobs

    def run(self, batch: StepBatch, micro_batches: int = 1) -> list[SampledToken]:
        """launch() and collect() in one."""
        return self.collect(self.launch(batch, micro_batches))

    def launch(self, batch: StepBatch, micro_batches: int = 1, bucket: int = 0, normal: bool = False) -> _Ran:
        """Runs one step to its end. Collective: every rank calls it, also with an empty batch.

        Args:
            micro_batches: 1 or more; the same on every rank. bucket: 0, see bucket_of().
            normal: with the exchange of many rows, which there is.
        Raises: ExchangeError if a peer fails.
        """
        self._clock.start()
        params = self._params
        params.kv_cache.progress.begin(micro_batches)
        parts = split(batch, micro_batches, params.kv_cache.block_size, params.compute.device)
        logits = interleave([self._decoder.forward(part, normal=normal) for part in parts])
        numbers = [number for part in parts for number in part.sampled]
        tokens = self._sample(numbers, torch.cat(logits)) if numbers else []
        self._clock.lap(Phase.SAMPLE)
        self._decoder.experts.finish()
        self._clock.finish()
        drawn = {token.number: token for token in tokens}
        scored = [result for part in parts if part.scorer for result in part.scorer.results()]
        return _Ran([drawn[s.number] for s in batch.slices if s.sample], scored)

    def _sample(self, numbers: list[int], logits: torch.Tensor) -> list[SampledToken]:
        followed = [number for number in numbers if number in self._masks] if len(self._masks) else []
        if not followed:
            return self._sampler.sample(numbers, logits)
        self._masks.wait(followed, PATIENCE_SECONDS)
        late = {number for number in followed if not self._masks.ready(number)}
        if late:
            rows = [row for row, number in enumerate(numbers) if number not in late]
            numbers, logits = [numbers[row] for row in rows], logits[rows]
        masks = {number: self._masks.mask(number) for number in followed if number not in late}
        given = {number: mask for number, mask in masks.items() if mask is not None}
        tokens = self._sampler.sample(numbers, logits, given) if numbers else []
        return tokens + [SampledToken(number, LATE_TOKEN) for number in late]

    def weights_changed(self) -> None:
        """As Runner.weights_changed: nothing is made of them."""

    def drop_steps(self) -> None:
        """As Runner.drop_steps: nothing is in flight between two calls."""

    def statistics(self) -> RunnerStatistics:
        """What was measured since the start."""
        counter = self._decoder.experts
        if self._rows is None:
            experts = self._params.exchange.spec.local_experts
            received = dict(zip(experts, counter.total.sum(0).tolist(), strict=True))
        else:
            received = self._rows.by_expert(counter.total.numpy())
        histograms, sums = self._clock.histograms(), self._clock.sums()
        moe = moe_counters(histograms, sums, sum(self._params.spec.sparse_layers))
        return RunnerStatistics(
            histograms,
            sums,
            received,
            {"experts_active": int(counter.active), **moe},
            experts_move=self._rows is not None,
        )

    def place(self, routes: Routes, held: Held) -> None:
        """See Runner."""
        table, counts = self._params.slots, self._decoder.experts.total.numpy()
        if table is None:
            raise InternalError("the experts of this rank cannot move")
        table.set(routes)
        if self._rows is None:
            self._rows = ExpertRows(self._params.spec.router.num_experts, held)
        else:
            self._rows.moved(counts, held)

    def expert_rows(self) -> np.ndarray:
        """See Runner."""
        if self._rows is None:
            raise InternalError("the experts of this rank cannot move")
        return self._rows.of(self._decoder.experts.total.numpy())
