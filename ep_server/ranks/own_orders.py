"""Orders to ranks that the launcher gives itself, and their answers. One event loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

from ep_server.errors import EpServerError, Unavailable
from ep_server.orders import DropChange, OrderDone, PrepareGeneration, RankOrder, refusals
from ep_server.ranks.board import Board
from ep_server.ranks.order_messages import order_message

PREPARE_SECONDS, DROP_SECONDS = 600.0, 1.0
OWN_NUMBERS = 1 << 48  # orders and changes from here on are the launcher's, those below are the engine's


class OwnOrders:
    """numbers: of orders and of changes."""

    def __init__(self, board: Board) -> None:
        self.numbers = itertools.count(OWN_NUMBERS)
        self._board = board
        self._answers: dict[int, dict[int, OrderDone]] = {}  # by order, by rank

    def on_done(self, rank: int, done: OrderDone) -> bool:
        """Keeps the answer to an order of the launcher's; False for one of the engine's."""
        if done.number in self._answers:
            self._answers[done.number][rank] = done
        return done.number >= OWN_NUMBERS

    @contextmanager
    def answers(
        self, ranks: Collection[int], order: RankOrder, work_number: int = 0
    ) -> Iterator[dict[int, OrderDone]]:
        """Sends an order. Yields: its answers by rank, as they come."""
        number = next(self.numbers)
        found = self._answers[number] = {}
        try:
            for rank in sorted(ranks):
                self._board.send(rank, order_message(order, number, work_number))
            yield found
        finally:
            del self._answers[number]

    async def give(
        self, ranks: Collection[int], order: RankOrder, seconds: float, disturbed: Callable[[], bool]
    ) -> None:
        """Has ranks carry out an order.

        seconds: in all. disturbed: the ranks will not all answer.
        Raises: Unavailable if one refuses or is lost; StartupError after so many seconds.
        """
        with self.answers(ranks, order) as found:
            await self._board.until(
                lambda: set(found) >= set(ranks) or disturbed(), seconds, "they prepare another generation"
            )
        if not set(found) >= set(ranks):
            raise Unavailable("a rank was lost meanwhile")
        if refused := refusals(found):
            raise Unavailable(refused)

    async def prepare(
        self,
        ranks: Collection[int],
        order: PrepareGeneration,
        incomplete: Callable[[], bool],
        present: Callable[[], Collection[int]],
        disturbed: Callable[[], bool],
    ) -> None:
        """Has ranks prepare a generation; if they do not all, those that are present drop it.

        incomplete: a rank is lost. disturbed: all are about to be regrouped, which drops it too.
        Raises: as give().
        """
        try:
            await self.give(ranks, order, PREPARE_SECONDS, incomplete)
            if incomplete():
                raise Unavailable("a rank was lost meanwhile")
        except EpServerError:
            with suppress(EpServerError):
                await self.give(present(), DropChange(order.change), DROP_SECONDS, disturbed)
            raise
