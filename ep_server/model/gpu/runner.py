"""Runs steps on one GPU: launches one without waiting, and hands its tokens over once they are there.

Tokens that are drawn stay on the device as the next step's input, so step n + 1 can be launched before the
tokens of step n are known (records.PENDING_TOKEN). Steps run in the order of their launches, on one stream.
One thread uses it; the caller provides torch.inference_mode.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from ep_server.errors import InternalError
from ep_server.model.decoder import DecoderParams, interleave
from ep_server.model.gpu.decoder import GpuDecoder
from ep_server.model.gpu.graphs import Graphs
from ep_server.model.gpu.rows import Rows
from ep_server.model.gpu.sampling import GpuSampler
from ep_server.model.gpu.step_input import InputShape, StepInput, StepTensors, sampled_slices
from ep_server.model.runner import RunnerStatistics
from ep_server.model.sampler import Sampler
from ep_server.model.timers import PhaseClock
from ep_server.records import Request, SampledToken, StepBatch

STAGES = 3  # steps whose input or tokens may be on their way
STEP_SECONDS = 60.0  # until a step must have ended; waits for peers inside it have shorter deadlines
LOOK_SECONDS = 20e-6  # between two looks at the device, which has the next step already


@dataclass(slots=True)
class Launched:
    """A step on its way. numbers: requests that draw, by row. order: the same in the order of the batch.

    tokens: [N], on the host once `arrived`, a CUDA event. known: what the host has drawn itself, by number.
    """

    numbers: list[int]
    order: list[int]
    tokens: torch.Tensor
    known: dict[int, SampledToken]
    arrived: Any = None


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """shape: of the largest step. buckets: rows of the steps of single tokens that are captured, if any.

    rows: how they travel.
    """

    shape: InputShape
    rows: Rows
    buckets: tuple[int, ...] = ()


class GpuRunner:
    """The model of one rank on one GPU.

    Args:
        params: weights prepared by TorchCompute on the device.
        sampler: of requests that the kernels cannot draw for; on the same device.
    """

    def __init__(self, params: DecoderParams, sampler: Sampler, options: GpuOptions) -> None:
        self._params, shape = params, options.shape
        self._decoder, self._check = GpuDecoder(params, options.rows), options.rows.check
        self._device = params.compute.device
        self._input = StepInput(shape, self._device, STAGES)
        self._sampler = GpuSampler(sampler, shape.sequences, self._device, STAGES)
        self._drawn = torch.zeros(shape.sequences, dtype=torch.int64, device=self._device)
        self._told = [self._input.host_buffer(shape.sequences, torch.int64) for _ in range(STAGES)]
        self._places: dict[int, int] = {}  # of the tokens that the last launch draws
        self._launches = 0
        self._clock = PhaseClock()
        self.graphs = Graphs(self._padded, options.buckets, self._device)

    def add(self, request: Request) -> None:
        """Creates the sampling state of a request. Raises: what Sampler.add raises."""
        self._sampler.add(request)

    def remove(self, number: int) -> None:
        """Drops the sampling state of a request."""
        self._sampler.remove(number)

    def run(self, batch: StepBatch, micro_batches: int = 1) -> list[SampledToken]:
        """launch() and collect() in one. micro_batches: only one on a GPU, as yet."""
        return self.collect(self.launch(batch, micro_batches))

    def bucket_of(self, batch: StepBatch) -> int:
        """Rows that a step is padded to for a graph; 0 = it cannot be one, or has nothing to run."""
        single = all(len(s.token_ids) == 1 and s.sample for s in batch.slices)
        return self.graphs.bucket_of(len(batch.slices)) if single and batch.slices else 0

    def launch(self, batch: StepBatch, micro_batches: int = 1, bucket: int = 0) -> Launched:
        """Enqueues a step. Collective: every rank calls it, also with an empty batch.

        Args:
            micro_batches: 1, as yet.
            bucket: rows that every rank pads this step of single tokens to, one of `graphs`; 0 = the step is
              run as it is, at any mix of chunks and tokens.
        Returns: what collect() takes, in the order of launches.
        Raises: ExchangeError if a peer failed; InternalError for a step beyond the shape or the bucket.
        """
        assert micro_batches == 1
        pieces = sampled_slices(batch)
        numbers, count = [piece.number for piece in pieces], len(pieces)
        step = self._input.fill(batch, self._places, bucket)
        if bucket:
            logits = self.graphs.replay(bucket)[:count]
        else:
            most = self._params.exchange.spec.max_tokens
            logits = self._forward(step, most)
        self._places = {number: place for place, number in enumerate(numbers)}
        draws = [self._sampler.draws(s.number, s.start + len(s.token_ids)) for s in pieces]
        known = self._sampler.sample(draws, logits, self._drawn[:count])
        return self._told_of(numbers, [s.number for s in batch.slices if s.sample], known)

    def collect(self, launched: Launched) -> list[SampledToken]:
        """Waits for a step; one token per slice that samples, in the order of its batch.

        Raises: ExchangeError if a peer failed: what was drawn then means nothing. InternalError if the device
          does not end the step.
        """
        if launched.arrived is not None:
            await_event(launched.arrived, STEP_SECONDS)
        self._check()
        drawn = dict(zip(launched.numbers, launched.tokens.tolist(), strict=True))
        return [
            launched.known.get(number) or SampledToken(number, drawn[number]) for number in launched.order
        ]

    def statistics(self) -> RunnerStatistics:
        """What was measured since the start; waits for the steps in flight. Phases are not timed here."""
        experts = self._params.exchange.spec.local_experts
        counter = self._decoder.experts
        return RunnerStatistics(
            self._clock.histograms(),
            self._clock.sums(),
            dict(zip(experts, counter.total.tolist(), strict=True)),
            {"experts_active": int(counter.active)},
        )

    def _padded(self, bucket: int) -> torch.Tensor:
        """The work of a graph. Returns: logits of all rows."""
        return self._forward(self._input.padded(bucket), bucket)

    def _forward(self, step: StepTensors, most: int) -> torch.Tensor:
        """One pass. Returns: logits [N, V]."""
        (logits,) = interleave([self._decoder.forward(step, self._drawn, most)])
        self._decoder.experts.finish()
        return logits

    def _told_of(self, numbers: list[int], order: list[int], known: dict[int, SampledToken]) -> Launched:
        """Sends what was drawn to the host, behind the step."""
        tokens = self._told[self._launches % STAGES][: len(numbers)]
        tokens.copy_(self._drawn[: len(numbers)], non_blocking=True)
        self._launches += 1
        launched = Launched(numbers, order, tokens, known)
        if self._device.type == "cuda":
            launched.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            launched.arrived.record()
        return launched


def await_event(event: Any, seconds: float) -> None:
    """Waits until the device has passed an event. Raises: InternalError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > deadline:
            raise InternalError(f"the device has not ended a step in {seconds:g} s")
        time.sleep(LOOK_SECONDS)
