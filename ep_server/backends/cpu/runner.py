"""Runs step batches on one rank: micro-batches through the decoder, logits through the sampler.

Holds the sampler state of the rank's requests and the step timers. The caller provides torch.inference_mode
and the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ep_server.models.batch import split
from ep_server.models.decoder import Decoder, DecoderParams, interleave
from ep_server.models.timers import Phase, PhaseClock
from ep_server.records import Request, SampledToken, StepBatch


class TokenSampler(Protocol):
    """Draws tokens; holds one generator and the penalty counts per request."""

    def add(self, request: Request) -> None:
        """A request joins."""
        ...

    def remove(self, number: int) -> None:
        """A request left."""
        ...

    def sample(self, numbers: Sequence[int], logits: torch.Tensor) -> list[SampledToken]:
        """One token per row of logits: [N, V] float32, which it may overwrite."""
        ...


@dataclass(frozen=True, slots=True)
class RunnerStatistics:
    """Cumulative measurements under the names of RankStatistics."""

    histograms: dict[str, tuple[int, ...]]
    sums: dict[str, int]
    expert_tokens: dict[int, int]
    counters: dict[str, int] = field(default_factory=dict)


class ModelRunner:
    """The model of one rank."""

    def __init__(self, params: DecoderParams, sampler: TokenSampler) -> None:
        self._params, self._sampler = params, sampler
        self._clock = PhaseClock()
        self._decoder = Decoder(params, self._clock)

    def add(self, request: Request) -> None:
        """Creates the sampler state of a request, before its first token is sampled."""
        self._sampler.add(request)

    def remove(self, number: int) -> None:
        """Drops the sampler state of a request."""
        self._sampler.remove(number)

    def bucket_of(self, batch: StepBatch) -> int:
        """0: a step on the CPU has the rows that it has."""
        return 0

    def micro_batches_of(self, bucket: int, agreed: int) -> int:
        """As agreed: any step can be cut."""
        return agreed

    def launch(self, batch: StepBatch, micro_batches: int, bucket: int) -> list[SampledToken]:
        """As run(): on the CPU nothing goes on by itself."""
        return self.run(batch, micro_batches)

    def collect(self, launched: list[SampledToken]) -> list[SampledToken]:
        """What launch() returned."""
        return launched

    def run(self, batch: StepBatch, micro_batches: int = 1) -> list[SampledToken]:
        """Runs one step. Collective: every rank calls it, also with an empty batch.

        Args:
            micro_batches: 1 or more; the same on every rank.
        Returns: one token per slice that samples, in the order the slices have in the batch.
        Raises: ExchangeError if a peer fails.
        """
        self._clock.start()
        params = self._params
        parts = split(batch, micro_batches, params.kv_cache.block_size, params.compute.device)
        logits = interleave([self._decoder.forward(part) for part in parts])
        numbers = [number for part in parts for number in part.sampled]
        tokens = self._sampler.sample(numbers, torch.cat(logits)) if numbers else []
        self._clock.lap(Phase.SAMPLE)
        self._decoder.experts.finish()
        self._clock.finish()
        drawn = {token.number: token for token in tokens}
        return [drawn[s.number] for s in batch.slices if s.sample]

    def statistics(self) -> RunnerStatistics:
        """What was measured since the start."""
        experts = self._params.exchange.spec.local_experts
        counter = self._decoder.experts
        return RunnerStatistics(
            self._clock.histograms(),
            self._clock.sums(),
            dict(zip(experts, counter.total.tolist(), strict=True)),
            {"experts_active": int(counter.active)},
        )
