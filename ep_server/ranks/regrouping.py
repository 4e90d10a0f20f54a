"""Has ranks take part in a generation, and follows who does. One event loop."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ep_server.errors import RankLost
from ep_server.ranks.board import Board
from ep_server.ranks.hosts import Replacing
from ep_server.ranks.messages import placement_message
from ep_server.ranks.signs import Kind, Sign
from ep_server.scheduler.placement import Placement
from ep_server.v1 import rank_pb2 as pb


class Regrouping:
    """Of the latest generation.

    there: ranks that take part. seconds: the longest for which one of them read experts.
    """

    def __init__(self, board: Board, replacing: Replacing) -> None:
        self._board, self._replacing = board, replacing
        self.generation = 0
        self.there: set[int] = set()
        self.seconds = 0.0

    def begin(self) -> None:
        """Another generation; no rank takes part yet."""
        self.generation += 1
        self.there, self.seconds = set(), 0.0

    def order(
        self, rank: int, live: Iterable[int], placement: Placement | None, kept: Iterable[int] = ()
    ) -> None:
        """Has a rank take part. kept: its requests that continue."""
        order = pb.Regroup(
            generation=self.generation,
            work_number=self._board.work_number,
            kept=kept,
            live=sorted(live),
            placement=None if placement is None else placement_message(placement),
            lost_kv=self._replacing.kv.lost,
        )
        self._board.send(rank, pb.ToRank(regroup=order))

    def on_regrouped(self, rank: int, message: pb.Regrouped) -> None:
        """A rank takes part in a generation."""
        if message.generation == self.generation:
            self.there.add(rank)
            self.seconds = max(self.seconds, message.load_seconds)

    async def until(self, live: Collection[int], seconds: float) -> None:
        """Until these take part, or there is a sign of another loss: one silent for `seconds` is lost.

        A rank that reads experts reports that now and then.
        """

        def over() -> bool:
            return self.there.issuperset(live) or bool(self._board.signs)

        for rank in await self._board.silent(over, lambda: set(live) - self.there, seconds):
            why = RankLost(f"reported nothing for {seconds:g} s while the ranks regroup")
            self._board.signs.append(Sign(Kind.CLOSED, rank, why))
