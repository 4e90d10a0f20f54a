"""The group of ranks as the engine uses it: `launcher.RankProcesses`, or FakeRanks in tests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ep_server.errors import EpServerError
from ep_server.orders import OrderDone, RankOrder
from ep_server.records import (
    KvEventBatch,
    LossCause,
    PromptLogprobs,
    RankReady,
    RankStatistics,
    Request,
    TokenEvent,
)
from ep_server.scheduler.placement import Placement

# What a thread computes before another one goes on, where one prepares something beside a loop: it publishes
# tokens (the server's), or runs steps (a rank's).
THREAD_TURN_SECONDS = 0.0002


def pid_space() -> str:
    """Boot and pid namespace of this process: where both are equal, a process id names the same process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


@dataclass(frozen=True, slots=True)
class GroupState:
    """A group of ranks from one generation to the next.

    live: ranks that serve. lacking_bytes: memory that they lack together to go on without any one of them;
      0 = any one may be lost now. placement: of experts in slots; None where they stay.
    ready: of the live ranks. out: ranks that stay out, and why.
    """

    generation: int
    live: tuple[int, ...]
    lacking_bytes: int
    placement: Placement | None = None
    ready: tuple[RankReady, ...] = ()
    out: dict[int, str] = field(default_factory=dict)


class RankListener(Protocol):
    """Called in the frontend's event loop, in the order in which a rank sent its messages."""

    def on_tokens(self, rank: int, events: Sequence[TokenEvent]) -> None:
        """The tokens of one step of one rank."""
        ...

    def on_prompt_logprobs(self, rank: int, scored: PromptLogprobs) -> None:
        """Of the next prompt tokens of a request, in order; all of them before its first token."""
        ...

    def on_freed(self, rank: int, number: int) -> None:
        """A cancelled request's KV blocks are back in the ledger."""
        ...

    def on_request_failed(self, rank: int, number: int, error: EpServerError) -> None:
        """A rank cannot run a request any further; its blocks are freed."""
        ...

    def on_statistics(self, statistics: RankStatistics) -> None:
        """About twice a second while the rank steps, and once when it parks."""
        ...

    def on_running(self, rank: int, sequences: int) -> None:
        """Sequences that a rank runs now, in prefill or decode; after a step that changed their number."""
        ...

    def on_begun(self, rank: int, numbers: Sequence[int], adding: int = 0, copied: int = 0) -> None:
        """Requests that are in a step of a rank for the first time since submit(); before it runs.

        adding: the request that it puts into its queue, until the next call for this rank; 0 = none.
        copied: tokens whose KV the rank has copied from memory of lost ranks since the last call.
        """
        ...

    def on_kv_events(self, batch: KvEventBatch) -> None:
        """Changes of a rank's prefix cache, while watch_cache() is on."""
        ...

    def on_order_done(self, rank: int, done: OrderDone) -> None:
        """A rank has carried out an order, or says why not."""
        ...

    def on_rank_lost(self, rank: int, cause: LossCause) -> None:
        """For each lost rank: before on_lost, or while restart() runs."""
        ...

    def on_group(self, state: GroupState) -> None:
        """Another generation serves, the first one included; of ranks that outlive the loss of others."""
        ...

    def on_left(self, rank: int) -> None:
        """A rank takes part no more, as planned. It has published all tokens that it will."""
        ...

    def on_lost(self, rank: int, message: str, seconds: float) -> None:
        """The group is unusable until restart() returns.

        rank: that was lost first. seconds: since the first sign of the loss.
        """
        ...

    def on_regroup(self, why: str) -> None:
        """As on_lost, where no rank is lost: other ranks take part from restart() on."""
        ...


@dataclass(frozen=True, slots=True)
class Restarted:
    """Ranks after a loss; those that are not ready are absent.

    kept: those whose processes went on, with the requests that they had.
    read_seconds: for which one of these read experts of lost ranks.
    """

    ready: list[RankReady]
    kept: frozenset[int] = frozenset()
    read_seconds: float = 0.0

    @property
    def load_seconds(self) -> float:
        """The longest that weights were read."""
        new = [ready.load_seconds for ready in self.ready if ready.rank not in self.kept]
        return max([self.read_seconds, *new])


class Ranks(Protocol):
    """A started group of ranks on this node."""

    num_ranks: int  # absent ones included

    async def start(
        self, listener: RankListener, progress: Callable[[int, str, int, int], None]
    ) -> list[RankReady]:
        """Spawns the ranks and returns when all are warm.

        Args:
            progress: called as progress(rank, stage, done, total) while weights load.
        Raises: StartupError with one line that says which rank could not start and why.
        """
        ...

    async def restart(self, awaited: Callable[[int], Collection[int]]) -> Restarted:
        """After on_lost: replaces the lost rank, or all ranks, for the same listener.

        Args:
            awaited: numbers of the requests that a rank goes on with, if its process does; called at the end.
        Raises: StartupError if they do not start, or if these ranks cannot be started again.
        """
        ...

    async def scale(self, count: int, hold_out: frozenset[int]) -> float:
        """Has so many ranks serve, 0 = as before, but not those held out. Requests of others continue.

        Returns: the longest pause of a rank, seconds.
        Raises: InvalidArgument for too many ranks; WrongState if these ranks cannot change or have too few
            expert slots; Unavailable if a rank is lost meanwhile.
        """
        ...

    def submit(self, rank: int, request: Request) -> None:
        """Queues a request on a rank and unparks the group. Does not block."""
        ...

    def cancel(self, rank: int, number: int) -> None:
        """Cancels; answered by on_freed at the end of the step in flight. Unknown numbers are ignored."""
        ...

    def watch_cache(self, *, on: bool) -> None:
        """Begins or ends on_kv_events. Every beginning is answered by the whole content of every cache."""
        ...

    def use_weights(self, path: str, version: int, files: str = "") -> None:
        """Ranks that start from now on load these weights. files: see PrepareWeights."""
        ...

    def forget_lost(self) -> None:
        """No request needs the KV blocks of lost ranks any more: each has a token again, or has ended."""
        ...

    def order(self, order: RankOrder, number: int) -> None:
        """Gives an order to all ranks, parked ones too; each answers by on_order_done with the number."""
        ...

    async def stop(self) -> None:
        """Ends all rank processes and waits for them; idempotent. Never raises."""
        ...
