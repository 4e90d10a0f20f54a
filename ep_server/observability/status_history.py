"""History of the status page: samples of the server over the last minutes. Pure.

Ranks report cumulative numbers; this module turns two samples into rates and quantiles. Units: seconds,
tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

from ep_server.observability.intervals import names_of
from ep_server.observability.quantiles import NANO, balance, merge, quantile
from ep_server.records import RankStatistics

OPS = ("dispatch", "combine")
KEPT_POINTS = 300
WINDOW_LOOKS = 15  # samples between the ends of a Window


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One sample of a server. at: any clock. up: by rank, False once lost. generated: tokens so far.

    generation: 1 and the recoveries. losses: by cause. recovered: requests that continued after one.
    token_gaps: (upper edge, gaps up to it) of the inter-token latency, cumulative, as Prometheus has them.
    """

    at: float
    generated: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    token_gaps: tuple[tuple[float, float], ...] = ()
    up: Mapping[int, bool] = field(default_factory=dict)
    ranks: Mapping[int, RankStatistics] = field(default_factory=dict)
    generation: float = 1
    losses: Mapping[str, float] = field(default_factory=dict)
    recovered: float = 0


@dataclass(frozen=True, slots=True)
class Point:
    """One moment of the charts. latency: op -> (p50, p99) since the previous sample, if any."""

    at: float
    tokens_per_second: float
    latency: dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Window:
    """Two samples of a server, the second later or the same. Values describe the time between them."""

    before: Snapshot
    now: Snapshot

    @property
    def seconds(self) -> float:
        """Time between the samples."""
        return self.now.at - self.before.at

    @property
    def tokens_per_second(self) -> float:
        """Tokens generated."""
        return (self.now.generated - self.before.generated) / self.seconds if self.seconds else 0.0

    def latency(self, op: str) -> tuple[float, float] | None:
        """(p50, p99) of whole operations over all ranks, or None where there was none."""
        names = [f"{name}/total" for name in names_of(op)]
        between = merge(self._grown(rank, name) for rank in self.now.ranks for name in names)
        return (quantile(between, 0.5), quantile(between, 0.99)) if any(between) else None

    def token_gap(self, q: float) -> float | None:
        """A quantile of the inter-token latency, or None without a token."""
        before = dict(self.before.token_gaps)
        counts = [(edge, count - before.get(edge, 0.0)) for edge, count in self.now.token_gaps]
        wanted, low, below = q * counts[-1][1] if counts else 0.0, 0.0, 0.0
        for edge, count in counts:
            if count and count >= wanted:
                return (
                    low if edge == float("inf") else low + (edge - low) * (wanted - below) / (count - below)
                )
            low, below = edge, count
        return None

    def counted(self, rank: int, name: str) -> int:
        """By how much a counter of a rank grew."""
        return _rank(self.now, rank).counters.get(name, 0) - self._before(rank).counters.get(name, 0)

    def steps(self, rank: int) -> int:
        """Steps a rank took."""
        return _rank(self.now, rank).load.steps - self._before(rank).load.steps

    def waits(self, rank: int) -> dict[int, float]:
        """Seconds per step that a rank waited, by the peer it waited for."""
        steps, found = self.steps(rank), dict[int, float]()
        before = self._before(rank).peer_wait_ns
        for (op, peer), waited in _rank(self.now, rank).peer_wait_ns.items():
            grown = (waited - before.get((op, peer), 0)) * NANO / max(steps, 1)
            found[peer] = found.get(peer, 0.0) + grown
        return found

    def awaited(self) -> dict[int, float]:
        """Seconds per step that the other ranks waited for each rank, their mean."""
        waits = {rank: self.waits(rank) for rank in sorted(self.now.ranks)}
        others = max(len(waits) - 1, 1)
        return {
            peer: sum(row.get(peer, 0.0) for rank, row in waits.items() if rank != peer) / others
            for peer in waits
        }

    def expert_tokens(self, rank: int) -> dict[int, int]:
        """Tokens that each expert of a rank received."""
        before = self._before(rank).expert_tokens
        now = _rank(self.now, rank).expert_tokens
        return {expert: count - before.get(expert, 0) for expert, count in sorted(now.items())}

    def expert_balance(self) -> float:
        """Mean over maximum of the tokens received by ranks: 1 is even, 0 without a token."""
        return balance(sum(self.expert_tokens(rank).values()) for rank in self.now.ranks)

    def _before(self, rank: int) -> RankStatistics:
        """The sample before; nothing where the rank is a new process since, which counts from 0."""
        before, now = _rank(self.before, rank), _rank(self.now, rank)
        return before if before.load.steps <= now.load.steps else RankStatistics(rank)

    def _grown(self, rank: int, name: str) -> list[int]:
        """By how much each bucket of a histogram grew."""
        later, earlier = (one.histograms.get(name, ()) for one in (_rank(self.now, rank), self._before(rank)))
        return [max(0, count - before) for count, before in zip_longest(later, earlier, fillvalue=0)]


class History:
    """The last samples. One writer; readers may be other threads."""

    def __init__(self) -> None:
        self._looks: deque[Snapshot] = deque(maxlen=WINDOW_LOOKS + 1)
        self._points: deque[Point] = deque(maxlen=KEPT_POINTS)

    def add(self, snapshot: Snapshot) -> None:
        """Adds a sample, later than all before."""
        if self._looks:
            step = Window(self._looks[-1], snapshot)
            latency = {op: found for op in OPS if (found := step.latency(op)) is not None}
            self._points.append(Point(snapshot.at, step.tokens_per_second, latency))
        self._looks.append(snapshot)

    @property
    def points(self) -> list[Point]:
        """Oldest first."""
        return list(self._points)

    def window(self) -> Window:
        """From the oldest complete sample to the last; with one sample, from the server's start."""
        looks = list(self._looks)
        if len(looks) > 1:
            return Window(looks[0], looks[-1])
        return Window(Snapshot(looks[0].at), looks[0]) if looks else Window(Snapshot(0.0), Snapshot(0.0))


def _rank(snapshot: Snapshot, rank: int) -> RankStatistics:
    return snapshot.ranks.get(rank, RankStatistics(rank))
