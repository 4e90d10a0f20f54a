"""Runs steps on one GPU: launches a step without waiting, and returns its tokens later.

Drawn tokens stay on the device as the next step's input, so step n + 1 can be launched before the host knows
the tokens of step n (records.PENDING_TOKEN). Steps run in launch order on one stream. One thread uses the
runner; the caller provides torch.inference_mode.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from ep_server.backends.cpu.runner import RunnerStatistics
from ep_server.backends.gpu.attention.decode_kernels import DecodeKernels
from ep_server.backends.gpu.chunk_copies import CopyRule
from ep_server.backends.gpu.clock import DeviceClock
from ep_server.backends.gpu.decoder import GpuDecoder, Pass
from ep_server.backends.gpu.graphs import GraphKey, Graphs, Modes, buckets_up_to, few, sizes_of, unseen
from ep_server.backends.gpu.kernels.triton.launch import Compilations
from ep_server.backends.gpu.kernels.triton.logprobs import SamplingReport
from ep_server.backends.gpu.moe.rows import RowsOfSteps
from ep_server.backends.gpu.moves import ExpertMoves
from ep_server.backends.gpu.sampling.sampler import GpuSampler
from ep_server.backends.gpu.side_stream import SideStream
from ep_server.backends.gpu.step_input import (
    InputShape,
    StepInput,
    StepTensors,
    ordered,
    prompts_of,
    sampled_slices,
)
from ep_server.backends.gpu.waiting import STEP_SECONDS, Snapshot
from ep_server.backends.masks import PATIENCE_SECONDS, Masks, NoMasks
from ep_server.errors import InternalError
from ep_server.exchange.device_wait import await_current, await_event
from ep_server.models.batch import cut
from ep_server.models.decoder import DecoderParams, interleave
from ep_server.models.kv_cache import KvCache
from ep_server.models.prompt_scorer import PromptScorer
from ep_server.models.slots import Held, Routes
from ep_server.models.timers import moe_counters, no_lap
from ep_server.records import LATE_TOKEN, PromptLogprobs, Request, SampledToken, SeqSlice, StepBatch

MOST_MICRO_BATCHES = 2
_ALIGNED = 16  # tokens: kernels are compiled for addresses that are a multiple of 16 bytes
STAGES = 3  # steps whose input or tokens may be in flight


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens on their way, by row. tokens: [N]; reported: log probabilities, if any; both on the host."""

    numbers: list[int]
    tokens: torch.Tensor
    reported: SamplingReport | None


@dataclass(frozen=True, slots=True)
class Waiting:
    """Rows that a grammar constrains, and what is left to do of their step.

    pieces: all that draw in the step, by row. rows: which of them wait. logits: of all rows.
    computed: a CUDA event behind the logits; None on the CPU. timed, decode: see DeviceClock.end().
    """

    pieces: list[SeqSlice]
    rows: list[int]
    logits: torch.Tensor
    computed: Any
    timed: bool
    decode: bool


@dataclass(slots=True)
class Launched:
    """A step in flight. order: requests that draw, in the order of the batch.

    scorers: of prompt tokens. arrived: a CUDA event; once it has passed, `drawn` and the results of the
      scorers are on the host. late: requests that draw nothing.
    """

    order: list[int]
    scorers: Sequence[PromptScorer] = ()
    drawn: list[Drawn] = field(default_factory=list)
    waiting: Waiting | None = None
    late: list[int] = field(default_factory=list)
    arrived: Any = None


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """shape: of the largest step. keys: of captured steps, if any.

    rows: how they are sent. timed_every: see DeviceClock; only steps of timed keys, if there are keys.
    kernels: of attention with one token per sequence; Triton's if None. copies: see GpuDecoder.
    """

    shape: InputShape
    rows: RowsOfSteps
    keys: tuple[GraphKey, ...] = ()
    timed_every: int = 0
    kernels: DecodeKernels | None = None
    copies: CopyRule | None = None


class GpuRunner:
    """The model of one rank on one GPU.

    Args:
        params: weights prepared by TorchCompute on the device.
    """

    def __init__(self, params: DecoderParams, options: GpuOptions, masks: Masks | None = None) -> None:
        self._params, self._rows, shape = params, options.rows, options.shape
        self._masks = NoMasks() if masks is None else masks
        self._compilations = Compilations()
        self._decoder = GpuDecoder(params, options.kernels, options.copies)
        self._device = params.compute.device
        self._side = SideStream(self._device) if self._device.type == "cuda" else None
        self._counted = Snapshot((self._decoder.experts.total, self._decoder.experts.active))
        given = shape, self._device, STAGES, options.copies
        self._inputs = [StepInput(*given) for _ in range(MOST_MICRO_BATCHES)]
        self._sampler = GpuSampler(params.spec.vocab_size, shape.sequences, self._device, STAGES)
        self._sampler.warm_up()
        # One for all graphs: each graph keeps its result, and separate ones would take gigabytes.
        self._logits = torch.empty(shape.sequences, params.spec.vocab_size, device=self._device)
        # Rows with a grammar are drawn behind the others, into the second half.
        self._masked_from = -(-shape.sequences // _ALIGNED) * _ALIGNED
        self._drawn = torch.zeros(self._masked_from + shape.sequences, dtype=torch.int64, device=self._device)
        self._host_tokens = [
            self._inputs[0].host_buffer(len(self._drawn), torch.int64) for _ in range(STAGES)
        ]
        stages = STAGES if self._device.type == "cuda" else 0
        self._arrived = [torch.cuda.Event() for _ in range(stages)]  # type: ignore[no-untyped-call]
        self._places: dict[int, int] = {}  # of the tokens that the last launch draws
        self._launches = 0
        self._masked = Counter[str]()  # see statistics()
        self._seconds = STEP_SECONDS + params.exchange.spec.timeout_ns / 1e9
        experts, total = params.spec.router.num_experts, self._decoder.experts.total
        self._moves = ExpertMoves(params.slots, experts, total, self._seconds)
        self._clock = DeviceClock(self._device, options.timed_every)
        self._clock.warm_up()
        self.graphs = Graphs(self._padded, options.keys, self._device, self._seconds)

    @property
    def kv_cache(self) -> KvCache:
        """The cache that steps read and write."""
        return self._params.kv_cache

    def add(self, request: Request) -> None:
        """Creates the sampling state of a request. Raises: as GpuSampler.add()."""
        self._sampler.add(request)

    def remove(self, number: int) -> None:
        """Drops the sampling state of a request."""
        self._sampler.remove(number)

    def prepare(self, progress: Callable[[int, int], None] = unseen, possible: Modes = few) -> None:
        """Compiles all kernels that steps of other sizes need, then captures the graphs. Collective.

        Kernels differ with the number of rows. So prompts of 1, 2, 4 ... rows in all run into the first KV
        blocks, which are not in use yet; those of 2 attend to a copy. Each bucket without a graph of a
        micro-batch runs too, because so many single tokens may accompany prompts. Ranks with fewer KV blocks
        run shorter prompts, but as often. possible: see Modes.
        Raises: InternalError if the device does not finish one.
        """
        shape, await_work = self._inputs[0].shape, partial(await_current, self._device, self._seconds)
        self.graphs.record_modes(possible)
        for size in sorted({*(1 << power for power in range(shape.tokens.bit_length())), shape.tokens}):
            blocks = len(self._params.kv_cache.layers[0].k)
            batch = prompts_of(size, shape, blocks, self._params.max_context)
            for normal in {*possible(size), *possible(size // 2 + 1)}:
                self._forward([self._inputs[0].fill(batch, {}, copy=size == 2)], GraphKey(0, normal=normal))
                # It may wait for slower ranks, so its input must still be there.
                await_work(f"prompts of {batch.num_tokens} rows")
        for given in self._inputs:  # nothing of what was run so far
            given.fill(StepBatch((), 0), {}, shape.tokens)
        singles = buckets_up_to(shape.sequences)
        for key in [GraphKey(rows, normal=normal) for rows in singles for normal in possible(rows)]:
            if key not in self.graphs:
                self._padded(key)
                await_work(f"a step of {key.bucket} rows")  # slower ranks may have to compile
        self.graphs.capture(progress)
        await_work("what was run before the last capture")  # so that statistics() includes all of it
        self._compilations.expect_none()

    def run(self, batch: StepBatch, micro_batches: int = 1) -> list[SampledToken]:
        """launch() and collect() in one, without a graph."""
        return self.collect(self.launch(batch, micro_batches))

    def bucket_of(self, batch: StepBatch) -> int:
        """Rows that a step is padded to for a graph; 0 = no graph fits, or it has nothing to run."""
        if not batch.slices:
            return 0
        if any(s.scored is not None for s in batch.slices):
            return 0  # graphs leave no logits of rows that are not sampled
        single = all(len(s.token_ids) == 1 for s in batch.slices)
        least = 0 if single else self._inputs[0].shape.sequences + 1  # see GraphKey
        return self.graphs.bucket_of(max(batch.num_tokens, least))

    def micro_batches_of(self, bucket: int, agreed: int) -> int:
        """How many micro-batches a step runs as, given the vote: one if no such graph was captured."""
        return agreed if not bucket or GraphKey(bucket, agreed) in self.graphs else 1

    def launch(
        self, batch: StepBatch, micro_batches: int = 1, bucket: int = 0, normal: bool = False
    ) -> Launched:
        """Enqueues a step. Collective: every rank calls it, also with an empty batch.

        Args:
            micro_batches: 1 or 2, the same on every rank; of micro_batches_of(). normal: see GraphKey.
            bucket: rows that every rank pads this step to, the maximum of bucket_of(); 0 = without a graph.
        Returns: the argument for collect(), in the order of launches.
        Raises: ExchangeError if a peer failed; InternalError for a step beyond the shape or the bucket.
        """
        sizes = sizes_of(bucket or batch.num_tokens, micro_batches)
        parts = cut(batch, micro_batches, sizes[0])
        pieces = [piece for part in parts for piece in sampled_slices(part)]
        steps = [
            given.fill(part, self._places, size if bucket else 0)
            for given, part, size in zip(self._inputs, parts, sizes, strict=False)
        ]
        key = self.graphs.with_copy(self._key(bucket, micro_batches, normal), steps[0].copied)
        self._params.kv_cache.progress.begin(micro_batches)
        scorers = [None if bucket else PromptScorer.of(ordered(part)) for part in parts]
        logits = self.graphs.replay(key)[: len(pieces)] if bucket else self._forward(steps, key, scorers)
        self._places = {}
        order = [s.number for s in batch.slices if s.sample]
        launched = Launched(order, [scorer for scorer in scorers if scorer is not None])
        masked = pieces if len(self._masks) else []
        waiting = [row for row, piece in enumerate(masked) if piece.number in self._masks]
        decode = 0 < bucket <= self._inputs[0].shape.sequences
        if waiting:
            computed = torch.cuda.current_stream().record_event() if self._arrived else None
            launched.waiting = Waiting(pieces, waiting, logits, computed, key.timed, decode)
            if free := [row for row in range(len(pieces)) if row not in waiting]:
                self._draw(launched, pieces, free, logits)
            return launched
        self._draw(launched, pieces, range(len(pieces)), logits)
        return self._behind(launched, key.timed, decode)

    def complete(self, launched: Launched) -> Sequence[int]:
        """Draws the rows that a grammar constrains, once their masks are there.

        Returns: requests left out because their masks are late, or because they have ended.
        """
        waiting, launched.waiting = launched.waiting, None
        if waiting is None:
            return ()
        numbers = {row: waiting.pieces[row].number for row in waiting.rows}
        began = time.perf_counter_ns()
        self._masks.wait(list(numbers.values()), PATIENCE_SECONDS)
        ready = [row for row, n in numbers.items() if n in self._masks and self._masks.ready(n)]
        masks = [self._masks.mask(numbers[row]) for row in ready]
        if ready:
            self._draw(launched, waiting.pieces, ready, waiting.logits, masks)
        launched.late = [number for row, number in numbers.items() if row not in ready]
        starved = waiting.computed is not None and waiting.computed.query()
        waited = time.perf_counter_ns() - began
        self._masked.update(masked_steps=1, mask_wait_ns=waited, mask_starved_steps=int(starved))
        self._behind(launched, waiting.timed, waiting.decode)
        return launched.late

    def collect(self, launched: Launched) -> list[SampledToken]:
        """Waits for a step; one token per slice that samples, in the order of its batch.

        Raises: ExchangeError if a peer failed: drawn tokens are invalid. InternalError if a step never ends.
        """
        self.complete(launched)
        if launched.arrived is not None:
            await_event(launched.arrived, self._seconds, "a step")
        self._rows.check()
        tokens = [SampledToken(number, LATE_TOKEN) for number in launched.late]
        for part in launched.drawn:
            tokens += self._sampler.sampled_tokens(part.numbers, part.tokens.tolist(), part.reported)
        if [token.number for token in tokens] == launched.order:
            return tokens
        drawn = {token.number: token for token in tokens}
        return [drawn[number] for number in launched.order]

    def prompt_logprobs(self, launched: Launched) -> Sequence[PromptLogprobs]:
        """Prompt scores of the slices with `scored` rows, after collect() has returned the step."""
        return [result for scorer in launched.scorers for result in scorer.results()]

    def weights_changed(self) -> None:
        """See Runner. Routers may be held once more in bfloat16."""
        self._decoder.renew_routers()

    def drop_steps(self) -> None:
        """Forgets the steps in flight, which the device has ended, whatever they drew.

        Requests stay, and continue after the tokens of the steps collected.
        """
        self._places = {}
        self._sampler.drop_steps()

    def statistics(self) -> RunnerStatistics:
        """Measurements since the start, maybe without steps in flight: does not wait for them.

        Of steps with a grammar: how many there were, how long their masks took once all else was enqueued,
        and how often the device had nothing left to do by then.
        """
        rows = self._moves.rows()
        clock, (total, active) = self._clock.read(), self._counted.take()
        if rows is None:
            local = self._params.exchange.spec.local_experts
            experts = dict(zip(local, total.sum(0).tolist(), strict=True))
        else:
            experts = rows.by_expert(total.numpy())
        counters = {"experts_active": int(active), "kernels_compiled": self._compilations.count}
        counters |= self._masked
        if clock.counters.get("timed_steps"):
            counters |= moe_counters(clock.histograms, clock.sums, sum(self._params.spec.sparse_layers))
        return RunnerStatistics(
            clock.histograms,
            clock.sums,
            experts,
            counters | clock.counters,
            experts_move=rows is not None,
        )

    def place(self, routes: Routes, held: Held) -> None:
        """See Runner."""
        self._moves.place(routes, held)

    def expert_rows(self) -> np.ndarray:
        """See Runner. Maybe without steps in flight."""
        rows = self._moves.rows()
        if rows is None:
            raise InternalError("the experts of this rank cannot move")
        return rows.of(self._counted.take()[0].numpy())

    def _key(self, bucket: int, micro_batches: int, normal: bool) -> GraphKey:
        """Of the next step, timed if that is due. If steps are captured, prompt steps are not timed."""
        key = GraphKey(bucket, micro_batches, timed=True, normal=normal)
        due = (key in self.graphs or not self.graphs.buckets) and self._clock.due()
        return key if due else key._replace(timed=False)

    def _padded(self, key: GraphKey) -> torch.Tensor:
        """The work of a graph. Returns: logits of all rows."""
        sizes = sizes_of(key.bucket, key.micro_batches)
        steps = [each.padded(n, copied=key.copied) for each, n in zip(self._inputs, sizes, strict=False)]
        return self._forward(steps, key)

    def _forward(
        self, steps: Sequence[StepTensors], key: GraphKey, scorers: Sequence[PromptScorer | None] = ()
    ) -> torch.Tensor:
        """One pass of each micro-batch, in turn. Returns: logits [N, V]."""
        self._clock.begin()
        most = sizes_of(key.bucket or self._params.exchange.spec.max_tokens, key.micro_batches)[0]
        rows, side = self._rows.many if key.normal else self._rows.one, self._side
        if key.micro_batches > 1:  # transfers run beside, and the other half beside them
            rows, side = self._rows.two, None
        counted = key.has_prompts(self._inputs[0].shape.sequences)
        on = Pass(self._drawn, most, rows, self._clock.lap if key.timed else no_lap, side, counted)
        pairs = zip_longest(steps, scorers)
        hidden = interleave([self._decoder.forward(step, on, scorer) for step, scorer in pairs])
        self._decoder.experts.finish()
        return self._decoder.logits(hidden, self._logits)

    def _draw(
        self,
        launched: Launched,
        pieces: list[SeqSlice],
        rows: Sequence[int],
        logits: torch.Tensor,
        masks: Sequence[np.ndarray | None] | None = None,
    ) -> None:
        """Enqueues the draw of some rows of a step. masks: what their grammars allow, if they have one."""
        drawing, first = pieces, 0 if masks is None else self._masked_from
        if len(rows) < len(pieces):
            drawing = [pieces[row] for row in rows]
            chosen = self._inputs[0].host_buffer(len(rows), torch.int64)
            chosen.numpy()[:] = rows
            logits = logits.index_select(0, chosen.to(self._device, non_blocking=True))
        end = first + len(rows)
        host = self._host_tokens[self._launches % STAGES][first:end]
        reported = self._sampler.sample(drawing, logits, self._drawn[first:end], host, pieces, masks)
        numbers = [piece.number for piece in drawing]
        self._places |= {number: first + place for place, number in enumerate(numbers)}
        launched.drawn.append(Drawn(numbers, host, reported))

    def _behind(self, launched: Launched, timed: bool, decode: bool) -> Launched:
        """Ends a step: its last stamp, and an event for collect()."""
        self._clock.end(timed, decode)
        if self._arrived:
            launched.arrived = self._arrived[self._launches % STAGES]
            launched.arrived.record()
        self._launches += 1
        return launched
