"""The group of ranks as the engine uses it: `launcher.RankProcesses`, or FakeRanks in tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ep_server.records import RankReady, RankStatistics, Request, TokenEvent


class RankListener(Protocol):
    """Called in the frontend's event loop, in the order in which a rank sent its messages."""

    def on_tokens(self, rank: int, events: Sequence[TokenEvent]) -> None:
        """The tokens of one step of one rank."""
        ...

    def on_freed(self, rank: int, number: int) -> None:
        """A cancelled request's KV blocks are back in the ledger."""
        ...

    def on_request_failed(self, rank: int, number: int, message: str) -> None:
        """A rank could not run a request (a bug of ours); its blocks are freed."""
        ...

    def on_statistics(self, statistics: RankStatistics) -> None:
        """About twice a second while the rank steps, and once when it parks."""
        ...

    def on_lost(self, rank: int, message: str) -> None:
        """The rank died or reported a fatal error. Called once per group; the group is unusable after it."""
        ...


class Ranks(Protocol):
    """A started group of ranks on this node."""

    num_ranks: int

    async def start(
        self, listener: RankListener, progress: Callable[[int, str, int, int], None]
    ) -> list[RankReady]:
        """Spawns the ranks and returns when all are warm.

        Args:
            progress: called as progress(rank, stage, done, total) while weights load.
        Raises: StartupError with one line that says which rank could not start and why.
        """
        ...

    def submit(self, rank: int, request: Request) -> None:
        """Queues a request on a rank and unparks the group. Does not block."""
        ...

    def cancel(self, rank: int, number: int) -> None:
        """Cancels; answered by on_freed at the end of the step in flight. Unknown numbers are ignored."""
        ...

    async def stop(self) -> None:
        """Ends all rank processes and waits for them; idempotent. Never raises."""
        ...
