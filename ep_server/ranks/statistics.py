"""Measures a rank's steps and merges the measurements of its parts into one record.

Cheap enough for every step: one addition per phase. Durations in nanoseconds; bucket b of a histogram counts
[2^b, 2^(b+1)).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from ep_server.ranks.vote import Verdict
from ep_server.records import RankLoad, RankStatistics, StepBatch, StepTrace, TokenEvent

BUCKETS = 48
LAST_STEPS = 64
K = TypeVar("K")


class Measured(Protocol):
    """A part with cumulative histograms and sums under the names of RankStatistics."""

    @property
    def histograms(self) -> Mapping[str, tuple[int, ...]]:
        """Counts per bucket by name."""
        ...

    @property
    def sums(self) -> Mapping[str, int]:
        """Sums of durations by name."""
        ...

    @property
    def expert_tokens(self) -> Mapping[int, int]:
        """Tokens received by global expert id."""
        ...

    @property
    def counters(self) -> Mapping[str, int]:
        """Cumulative numbers by name."""
        ...

    @property
    def experts_move(self) -> bool:
        """The exchange counts slots, whatever experts they hold."""
        ...


class Histogram:
    """Durations of one kind."""

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.sum = 0

    def add(self, ns: int) -> None:
        """Counts one duration; 0 counts as 1 ns."""
        self.counts[min(max(ns, 1).bit_length(), BUCKETS) - 1] += 1
        self.sum += ns


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Clock readings of one step, ns: at its start and after each part."""

    start: int
    planned: int
    voted: int
    ran: int
    published: int


class StepMeter:
    """Counts steps, tokens and time of one rank. One thread calls it.

    Args:
        sequences: the most in a step; a captured step with more rows has chunks of prompts.
    """

    def __init__(self, rank: int, sequences: int) -> None:
        self.rank, self._sequences = rank, sequences
        self._times = {name: Histogram() for name in ("plan", "vote", "publish", "total")}
        self._queue = Histogram()
        self._arrived: dict[int, int] = {}
        self._queued: dict[int, int] = {}  # running, no token published yet
        names = ("tokens", "padded_tokens", "idle_steps", "overlap_steps", "run_steps", "parks")
        graphs = ("graph_steps", "decode_steps", "decode_tokens")  # captured; those of single tokens alone
        self._counters = dict.fromkeys((*names, *graphs), 0)
        self._decode_ns = 0
        self._last_steps: deque[StepTrace] = deque(maxlen=LAST_STEPS)
        self._published = 0
        self._warm_up = _Parts.of({}, None)

    @property
    def last_step(self) -> StepTrace:
        """The step that ended last."""
        return self._last_steps[-1]

    @property
    def steps(self) -> int:
        """Steps that ended; the number of the next one."""
        return self._counters["run_steps"]

    def ready(self, exchange: Mapping[str, Any], runner: Measured) -> None:
        """Excludes everything measured so far, the warm-up, from records. Arguments as of gather()."""
        self._warm_up = _Parts.of(exchange, runner)

    def arrived(self, number: int, now: int) -> None:
        """Counts a new request."""
        self._arrived[number] = now

    def left(self, number: int) -> None:
        """A request ended, possibly before it ran."""
        self._arrived.pop(number, None)
        self._queued.pop(number, None)

    def began(self, batch: StepBatch, now: int) -> list[int]:
        """A planned step is about to run. Returns: numbers of the requests whose first one it is."""
        begun = []
        if self._arrived:
            for piece in batch.slices:
                arrived = self._arrived.pop(piece.number, None)
                if arrived is not None:
                    self._queue.add(now - arrived)
                    self._queued[piece.number] = now - arrived
                    begun.append(piece.number)
        return begun

    def with_queue_times(self, events: Sequence[TokenEvent]) -> Sequence[TokenEvent]:
        """The events; a request's first one carries its queue time."""
        if not self._queued:
            return events
        return [event._replace(queued_ns=self._queued.pop(event.number, 0)) for event in events]

    def parked(self, work_number: int) -> None:
        """The group parks; work_number is the last it has seen."""
        self._counters["parks"] += 1
        self._counters["parked_at_work"] = work_number

    def stepped(self, batch: StepBatch, micro_batches: int, times: StepTimes, *, bucket: int = 0) -> int:
        """A step ended.

        Args:
            bucket: rows that a captured step was padded to; 0 = not captured.
        Returns: its duration in ns, counted from the end of the previous step if that ended later than this
          one began, so that durations add up to elapsed time for a rank that runs ahead.
        """
        took = times.published - max(times.start, self._published)
        self._published = times.published
        self._times["plan"].add(times.planned - times.start)
        self._times["vote"].add(times.voted - times.planned)
        self._times["publish"].add(times.published - times.ran)
        self._times["total"].add(took)
        counters = self._counters
        self._last_steps.append(_trace(counters["run_steps"], batch, micro_batches, times))
        counters["run_steps"] += 1
        counters["tokens"] += batch.num_tokens
        counters["idle_steps"] += not batch.slices
        counters["overlap_steps"] += micro_batches > 1
        if bucket:
            counters["padded_tokens"] += bucket - batch.num_tokens
            counters["graph_steps"] += 1
        if 0 < bucket <= self._sequences:
            counters["decode_steps"] += 1
            counters["decode_tokens"] += batch.num_tokens
            self._decode_ns += took
        return took

    def gather(
        self,
        load: RankLoad,
        exchange: Mapping[str, Any],
        runner: Measured,
        copied: Mapping[str, int] = MappingProxyType({}),
    ) -> RankStatistics:
        """All measurements since ready(), as one record.

        Args:
            exchange: Exchange.statistics().
            runner: ModelRunner.statistics(); its expert counts are used where the exchange has none.
            copied: KvCopier.counters().
        """
        own = {f"step/{name}": histogram for name, histogram in self._times.items()}
        own["request/queue"] = self._queue
        parts = _Parts.of(exchange, runner).since(self._warm_up)
        return RankStatistics(
            rank=self.rank,
            load=load,
            histograms=_trimmed({**parts.histograms, **{name: h.counts for name, h in own.items()}}),
            sums={**parts.sums, **{name: h.sum for name, h in own.items()}, "step/decode": self._decode_ns},
            counters={**parts.counters, **self._counters, **copied},
            peer_wait_ns=parts.peer_wait_ns,
            expert_tokens=parts.expert_tokens,
            last_steps=tuple(self._last_steps),
        )


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose tokens are not collected yet. launched: the runner's handle. bucket: 0 = not padded.

    began: clock at its start, once planned, once voted; ns.
    """

    batch: StepBatch
    verdict: Verdict
    launched: Any
    bucket: int
    micro_batches: int
    began: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Parts:
    """Measurements of exchange and runner at one moment; fields as in RankStatistics."""

    histograms: Mapping[str, Sequence[int]]
    sums: dict[str, int]
    counters: dict[str, int]
    peer_wait_ns: dict[tuple[str, int], int]
    expert_tokens: dict[int, int]

    @classmethod
    def of(cls, exchange: Mapping[str, Any], runner: Measured | None) -> _Parts:
        """Both merged; either may be empty."""
        found = {name: dict(exchange.get(name, {})) for name in cls.__slots__}
        if runner is not None:
            found["histograms"] |= runner.histograms
            found["sums"] |= runner.sums
            found["counters"] |= runner.counters
            # A single rank's rows bypass the exchange.
            if runner.experts_move or not any(found["expert_tokens"].values()):
                found["expert_tokens"] = dict(runner.expert_tokens)
        return cls(**found)

    def since(self, before: _Parts) -> _Parts:
        """The measurements since `before`."""
        histograms = {
            name: [
                now - then for now, then in zip_longest(counts, before.histograms.get(name, ()), fillvalue=0)
            ]
            for name, counts in self.histograms.items()
        }
        return _Parts(
            histograms,
            _less(self.sums, before.sums),
            _less(self.counters, before.counters),
            _less(self.peer_wait_ns, before.peer_wait_ns),
            _less(self.expert_tokens, before.expert_tokens),
        )


def _trace(step: int, batch: StepBatch, micro_batches: int, times: StepTimes) -> StepTrace:
    return StepTrace(
        step=step,
        start_ns=times.start,
        tokens=batch.num_tokens,
        sequences=len(batch.slices),
        micro_batches=micro_batches,
        plan_ns=times.planned - times.start,
        vote_ns=times.voted - times.planned,
        run_ns=times.ran - times.voted,
        publish_ns=times.published - times.ran,
    )


def _less(now: Mapping[K, int], before: Mapping[K, int]) -> dict[K, int]:
    return {key: number - before.get(key, 0) for key, number in now.items()}


def _trimmed(histograms: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Without empty buckets at the end and without empty histograms."""
    result = {}
    for name, counts in histograms.items():
        size = len(counts)
        while size and not counts[size - 1]:
            size -= 1
        if size:
            result[name] = tuple(counts[:size])
    return result
