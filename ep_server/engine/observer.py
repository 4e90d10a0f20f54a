"""Events that the engine reports, as a Protocol that the metrics implement.

Called synchronously in the event loop: an observer must not block. Units: seconds, tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from ep_server.errors import EpServerError, InternalError, RequestCancelled
from ep_server.records import LossCause, RankReady, RankStatistics


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """How a request ended.

    status: gRPC status name, "OK" where it finished. reason: a FinishReason. Where it did not finish:
    "slow_reader" where the caller read too slowly, else "".
    seconds: from admission. output_tokens: delivered, or lost with the stream.
    first_token_seconds: from admission, None without a token. queued_seconds: of these, before it ran.
    """

    status: str
    reason: str
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first_token_seconds: float | None = None
    queued_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RankQueue:
    """Requests of a rank now: in prefill or decode, and not begun."""

    running: int
    queued: int


class RecoveryPhase(StrEnum):
    """Parts of a recovery. They overlap: each says where it begins and ends."""

    DETECT = "detect"  # from the first sign of the loss until it is reported, which begins the others
    REGROUP = "regroup"  # from the loss until all ranks serve again
    LOAD = "load"  # of that: the slowest new process, from its start until it is warm
    FIRST_TOKEN = "first_token"  # from the loss until the first continued request has its next token
    PREFILL = "prefill"  # from REGROUP's end until every continued request has its next token or has ended


class EngineObserver(Protocol):
    """Receives the engine's events. Every admitted request causes one on_admitted and one on_finished."""

    def on_rank_ready(self, ready: RankReady) -> None:
        """A rank is warm."""
        ...

    def on_rank_out(self, rank: int) -> None:
        """A rank is absent until it is ready again."""
        ...

    def on_queues(self, queues: Callable[[], Sequence[RankQueue]]) -> None:
        """The ranks are warm. queues: asked at any time, from any thread: the queue of each rank."""
        ...

    def on_rank_lost(self, rank: int, cause: LossCause) -> None:
        """A rank is lost; requests in flight pause until on_recovered, or end UNAVAILABLE."""
        ...

    def on_group(self, live: int, lacking_bytes: int) -> None:
        """Another generation of CPU ranks serves, of so many. lacking_bytes: see protocol.GroupState."""
        ...

    def on_recovered(self, seconds: float, requests: int) -> None:
        """A new group of ranks serves, so long after the loss; these requests continue."""
        ...

    def on_imbalance(self, mean: float, worst: float) -> None:
        """Most loaded rank's rows over the mean, measured: over all layers, and of the worst layer."""
        ...

    def on_experts_moved(self, loads: int) -> None:
        """Another placement is in force, for which ranks loaded so many experts of a layer."""
        ...

    def on_recovery_phase(self, phase: RecoveryPhase, seconds: float) -> None:
        """A phase of a recovery ended. A loss during a recovery begins all of them again."""
        ...

    def on_statistics(self, statistics: RankStatistics) -> None:
        """A rank's cumulative measurements, about twice a second."""
        ...

    def on_admitted(self, prompt_tokens: int) -> None:
        """A request was given to a rank."""
        ...

    def on_refused(self, status: str) -> None:
        """A request was refused before a rank saw it: queue full, duplicate id, bad field, draining."""
        ...

    def on_accept_wait(self, seconds: float) -> None:
        """Time that a call waited until the process accepted it; a sample, several times a second."""
        ...

    def on_first_token(self, seconds: float) -> None:
        """Time to first token, from admission."""
        ...

    def on_token_gap(self, seconds: float) -> None:
        """Time between two tokens of one request."""
        ...

    def on_finished(self, summary: RequestSummary) -> None:
        """A request ended, well or not."""
        ...

    def on_freed(self, seconds: float) -> None:
        """Time from a cancel to the KV blocks being free again."""
        ...

    def on_unread_ended(self) -> None:
        """An ended request's call was closed unread: its reader was too slow, or it was aborted."""
        ...

    def on_load(self, running: int, waiting: int, unread: int) -> None:
        """Requests in flight with and without a first token, and ended but not read; after every change."""
        ...


class NullObserver:
    """Ignores every event."""

    def on_rank_ready(self, ready: RankReady) -> None:
        """Ignored."""

    def on_rank_out(self, rank: int) -> None:
        """Ignored."""

    def on_queues(self, queues: Callable[[], Sequence[RankQueue]]) -> None:
        """Ignored."""

    def on_rank_lost(self, rank: int, cause: LossCause) -> None:
        """Ignored."""

    def on_group(self, live: int, lacking_bytes: int) -> None:
        """Ignored."""

    def on_recovered(self, seconds: float, requests: int) -> None:
        """Ignored."""

    def on_imbalance(self, mean: float, worst: float) -> None:
        """Ignored."""

    def on_experts_moved(self, loads: int) -> None:
        """Ignored."""

    def on_recovery_phase(self, phase: RecoveryPhase, seconds: float) -> None:
        """Ignored."""

    def on_statistics(self, statistics: RankStatistics) -> None:
        """Ignored."""

    def on_admitted(self, prompt_tokens: int) -> None:
        """Ignored."""

    def on_refused(self, status: str) -> None:
        """Ignored."""

    def on_accept_wait(self, seconds: float) -> None:
        """Ignored."""

    def on_first_token(self, seconds: float) -> None:
        """Ignored."""

    def on_token_gap(self, seconds: float) -> None:
        """Ignored."""

    def on_finished(self, summary: RequestSummary) -> None:
        """Ignored."""

    def on_freed(self, seconds: float) -> None:
        """Ignored."""

    def on_unread_ended(self) -> None:
        """Ignored."""

    def on_load(self, running: int, waiting: int, unread: int) -> None:
        """Ignored."""


@contextmanager
def counting_refusals(observer: EngineObserver) -> Iterator[None]:
    """Reports an error raised inside: a request that no rank will see."""
    try:
        yield
    except EpServerError as error:
        observer.on_refused(error.status)
        raise
    except asyncio.CancelledError:
        observer.on_refused(RequestCancelled.status)
        raise
    except Exception:
        observer.on_refused(InternalError.status)
        raise
