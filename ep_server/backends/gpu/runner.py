"""Runs steps on one GPU: launches a step without waiting and returns its tokens once they are there.

Drawn tokens stay on the device as the next step's input, so step n + 1 can be launched before the host knows
the tokens of step n (records.PENDING_TOKEN). Steps run in launch order on one stream. One thread uses the
runner; the caller provides torch.inference_mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ep_server.backends.cpu.runner import RunnerStatistics
from ep_server.backends.gpu.attention.decode_kernels import DecodeKernels
from ep_server.backends.gpu.clock import DeviceClock
from ep_server.backends.gpu.decoder import GpuDecoder, Pass
from ep_server.backends.gpu.graphs import GraphKey, Graphs, buckets_up_to
from ep_server.backends.gpu.kernels.triton.launch import Compilations
from ep_server.backends.gpu.kernels.triton.logprobs import SamplingReport
from ep_server.backends.gpu.moe.rows import RowsOfSteps
from ep_server.backends.gpu.sampling.sampler import GpuSampler
from ep_server.backends.gpu.side_stream import SideStream
from ep_server.backends.gpu.step_input import InputShape, StepInput, StepTensors, sampled_slices
from ep_server.backends.gpu.waiting import STEP_SECONDS, Snapshot, await_device, await_event
from ep_server.models.batch import cut
from ep_server.models.decoder import DecoderParams, interleave
from ep_server.models.timers import no_lap
from ep_server.records import Request, SampledToken, SeqSlice, StepBatch

MOST_MICRO_BATCHES = 2
STAGES = 3  # steps whose input or tokens may be on their way


@dataclass(slots=True)
class Launched:
    """A step on its way. numbers: requests that draw, by row. order: the same in the order of the batch.

    tokens: [N]; reported: log probabilities, if any; on the host once `arrived`, a CUDA event.
    """

    numbers: list[int]
    order: list[int]
    tokens: torch.Tensor
    reported: SamplingReport | None
    arrived: Any = None


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """shape: of the largest step. keys: of the steps that are captured, if any.

    rows: how they travel. timed_every: see DeviceClock; only steps of timed keys, if there are keys.
    kernels: of attention with one token per sequence; Triton's if None.
    """

    shape: InputShape
    rows: RowsOfSteps
    keys: tuple[GraphKey, ...] = ()
    timed_every: int = 0
    kernels: DecodeKernels | None = None


class GpuRunner:
    """The model of one rank on one GPU.

    Args:
        params: weights prepared by TorchCompute on the device.
    """

    def __init__(self, params: DecoderParams, options: GpuOptions) -> None:
        self._params, self._rows, shape = params, options.rows, options.shape
        self._compilations = Compilations()
        self._decoder, self._device = GpuDecoder(params, options.kernels), params.compute.device
        self._side = SideStream(self._device) if self._device.type == "cuda" else None
        self._counted = Snapshot((self._decoder.experts.total, self._decoder.experts.active))
        self._inputs = [StepInput(shape, self._device, STAGES) for _ in range(MOST_MICRO_BATCHES)]
        self._sampler = GpuSampler(params.spec.vocab_size, shape.sequences, self._device, STAGES)
        self._sampler.warm_up()
        # One for all graphs: each keeps what it returns, and these would be gigabytes.
        self._logits = torch.empty(shape.sequences, params.spec.vocab_size, device=self._device)
        self._drawn = torch.zeros(shape.sequences, dtype=torch.int64, device=self._device)
        self._host_tokens = [self._inputs[0].host_buffer(shape.sequences, torch.int64) for _ in range(STAGES)]
        stages = STAGES if self._device.type == "cuda" else 0
        self._arrived = [torch.cuda.Event() for _ in range(stages)]  # type: ignore[no-untyped-call]
        self._places: dict[int, int] = {}  # of the tokens that the last launch draws
        self._launches = 0
        self._seconds = STEP_SECONDS + params.exchange.spec.timeout_ns / 1e9
        self._clock = DeviceClock(self._device, options.timed_every)
        self._clock.warm_up()
        self.graphs = Graphs(self._padded, options.keys, self._device, self._seconds)

    def add(self, request: Request) -> None:
        """Creates the sampling state of a request. Raises: what GpuSampler.add raises."""
        self._sampler.add(request)

    def remove(self, number: int) -> None:
        """Drops the sampling state of a request."""
        self._sampler.remove(number)

    def prepare(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles all kernels that steps of other sizes need, then captures the graphs. Collective.

        Kernels differ with the number of rows: prompts of 1, 2, 4 ... rows in all are run into the first KV
        blocks, which belong to nobody yet, and each bucket without a graph of one micro-batch: so many single
        tokens may come beside prompts. Ranks with fewer KV blocks run shorter prompts, but as often.
        Raises: InternalError if the device does not end one of them.
        """
        shape = self._inputs[0].shape
        for size in sorted({*(1 << power for power in range(shape.tokens.bit_length())), shape.tokens}):
            blocks = len(self._params.kv_cache.layers[0].k)
            batch = prompts_of(size, shape, blocks, self._params.max_context)
            self._forward([self._inputs[0].fill(batch, {})], GraphKey(0))
            # For slower ranks perhaps: its input must still be there.
            self._await(f"prompts of {batch.num_tokens} rows")
        for given in self._inputs:  # nothing of what was run so far
            given.fill(StepBatch((), 0), {}, shape.tokens)
        for bucket in buckets_up_to(shape.sequences):
            if GraphKey(bucket) not in self.graphs:
                self._padded(GraphKey(bucket))
                self._await(f"a step of {bucket} rows")  # slower ranks may have to compile
        self.graphs.capture(progress)
        self._await("what was run before the last capture")  # so that statistics() has all of it
        self._compilations.expect_none()

    def run(self, batch: StepBatch, micro_batches: int = 1) -> list[SampledToken]:
        """launch() and collect() in one, without a graph."""
        return self.collect(self.launch(batch, micro_batches))

    def bucket_of(self, batch: StepBatch) -> int:
        """Rows that a step is padded to for a graph; 0 = there is none for it, or it has nothing to run."""
        if not batch.slices:
            return 0
        single = all(len(s.token_ids) == 1 and s.sample for s in batch.slices)
        least = 0 if single else self._inputs[0].shape.sequences + 1  # of a graph with chunks, see GraphKey
        return self.graphs.bucket_of(max(batch.num_tokens, least))

    def micro_batches_of(self, bucket: int, agreed: int) -> int:
        """How many a step is run as where the ranks agreed on so many: one if no such graph was captured."""
        return agreed if not bucket or GraphKey(bucket, agreed) in self.graphs else 1

    def launch(self, batch: StepBatch, micro_batches: int = 1, bucket: int = 0) -> Launched:
        """Enqueues a step. Collective: every rank calls it, also with an empty batch.

        Args:
            micro_batches: 1 or 2, the same on every rank; of micro_batches_of().
            bucket: rows that every rank pads this step to, one of `graphs`, the most that bucket_of() says on
              any rank; 0 = the step is run as it is.
        Returns: what collect() takes, in the order of launches.
        Raises: ExchangeError if a peer failed; InternalError for a step beyond the shape or the bucket.
        """
        sizes = sizes_of(bucket or batch.num_tokens, micro_batches)
        parts = cut(batch, micro_batches, sizes[0])
        pieces = [piece for part in parts for piece in sampled_slices(part)]
        numbers, count = [piece.number for piece in pieces], len(pieces)
        steps = [
            given.fill(part, self._places, size if bucket else 0)
            for given, part, size in zip(self._inputs, parts, sizes, strict=False)
        ]
        key = GraphKey(bucket, micro_batches, self._timed(bucket, micro_batches))
        logits = self.graphs.replay(key)[:count] if bucket else self._forward(steps, key)
        self._places = {number: place for place, number in enumerate(numbers)}
        host_tokens = self._host_tokens[self._launches % STAGES][:count]
        reported = self._sampler.sample(pieces, logits, self._drawn[:count], host_tokens)
        self._clock.end(key.timed, 0 < bucket <= self._inputs[0].shape.sequences)
        return self._behind(
            Launched(numbers, [s.number for s in batch.slices if s.sample], host_tokens, reported)
        )

    def collect(self, launched: Launched) -> list[SampledToken]:
        """Waits for a step; one token per slice that samples, in the order of its batch.

        Raises: ExchangeError if a peer failed: what was drawn then means nothing. InternalError if the device
          does not end the step.
        """
        if launched.arrived is not None:
            await_event(launched.arrived, self._seconds)
        self._rows.check()
        tokens = self._sampler.sampled_tokens(launched.numbers, launched.tokens.tolist(), launched.reported)
        if launched.order == launched.numbers:
            return tokens
        drawn = {token.number: token for token in tokens}
        return [drawn[number] for number in launched.order]

    def statistics(self) -> RunnerStatistics:
        """What was measured since the start. Waits for no step in flight, which may be in it or not."""
        clock, (total, active) = self._clock.read(), self._counted.take()
        experts = dict(zip(self._params.exchange.spec.local_experts, total.tolist(), strict=True))
        counters = {"experts_active": int(active), "kernels_compiled": self._compilations.count}
        return RunnerStatistics(clock.histograms, clock.sums, experts, counters | clock.counters)

    def _await(self, what: str) -> None:
        await_device(self._device, self._seconds, what)

    def _timed(self, bucket: int, micro_batches: int) -> bool:
        """Whether the next step's phases are timed. Where steps are captured, those of prompts are not."""
        key = GraphKey(bucket, micro_batches, timed=True)
        return (key in self.graphs or not self.graphs.buckets) and self._clock.due()

    def _padded(self, key: GraphKey) -> torch.Tensor:
        """The work of a graph. Returns: logits of all rows."""
        sizes = sizes_of(key.bucket, key.micro_batches)
        steps = [given.padded(size) for given, size in zip(self._inputs, sizes, strict=False)]
        return self._forward(steps, key)

    def _forward(self, steps: Sequence[StepTensors], key: GraphKey) -> torch.Tensor:
        """One pass of each micro-batch, in turn. Returns: logits [N, V]."""
        self._clock.begin()
        most = sizes_of(key.bucket or self._params.exchange.spec.max_tokens, key.micro_batches)[0]
        rows, side = self._rows.one, self._side
        if key.micro_batches > 1:  # transfers run beside, and the other half beside them
            rows, side = self._rows.two, None
        on = Pass(self._drawn, most, rows, self._clock.lap if key.timed else no_lap, side)
        hidden = interleave([self._decoder.forward(step, on) for step in steps])
        self._decoder.experts.finish()
        return self._decoder.logits(hidden, self._logits)

    def _behind(self, launched: Launched) -> Launched:
        """Records an event that tells collect() when the step has ended."""
        if self._arrived:
            launched.arrived = self._arrived[self._launches % STAGES]
            launched.arrived.record()
        self._launches += 1
        return launched


def sizes_of(rows: int, micro_batches: int) -> list[int]:
    """Rows of each micro-batch: as even as can be, the first one the largest."""
    return [(rows + micro_batches - 1 - index) // micro_batches for index in range(micro_batches)]


def prompts_of(rows: int, shape: InputShape, blocks: int, max_context: int) -> StepBatch:
    """Prompts of `rows` rows together, or of as many as fit, that use the first blocks of the cache.

    Args:
        shape: of the largest step. blocks: of the cache. max_context: longest sequence, tokens.
    """
    pieces = list[SeqSlice]()
    held, left = min(shape.blocks, blocks), rows  # blocks of a sequence, rows still to place
    while left > 0 and len(pieces) < shape.sequences:
        first = len(pieces) * held
        own = range(first, min(first + held, blocks))
        count = min(left, len(own) * shape.block_size, max_context)
        if count == 0:
            break
        used = tuple(own[: -(-count // shape.block_size)])
        pieces.append(SeqSlice(len(pieces), 0, (0,) * count, used, sample=False))
        left -= count
    return StepBatch(tuple(pieces), rows - left)
