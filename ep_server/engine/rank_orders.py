"""Orders to all ranks that each rank answers: flush the prefix cache, profiles, changes.

Used in one event loop. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ep_server.errors import DeadlineExceeded, EpServerError, Unavailable, WrongState
from ep_server.orders import OrderDone, RankOrder, refusals
from ep_server.ranks.protocol import Ranks

TURN_SECONDS = 120.0  # that a change waits for those before it
T = TypeVar("T")


@dataclass(slots=True)
class _Open:
    """An order that some ranks have not answered. asked: ranks. done: by rank."""

    asked: frozenset[int]
    answered: asyncio.Future[None]
    done: dict[int, OrderDone] = field(default_factory=dict)


class RankOrders:
    """Sends orders and collects the answers."""

    def __init__(self, ranks: Ranks) -> None:
        self.live: Collection[int] = range(ranks.num_ranks)  # ranks that answer
        self._ranks = ranks
        self._numbers = itertools.count(1)
        self._open: dict[int, _Open] = {}
        self._over: EpServerError | None = None
        self._begun: set[str] = set()  # changes that wait or run, by name
        self.changing = asyncio.Lock()  # held by who has the ranks prepare a change, until they have switched
        self.changes = itertools.count(1)  # numbers of changes

    async def give(self, order: RankOrder, seconds: float, what: str) -> Sequence[OrderDone]:
        """Has all ranks carry out an order. what: it, in words, for errors.

        Returns: the answers, in rank order.
        Raises: Unavailable if a rank refuses or the ranks end; DeadlineExceeded after `seconds`, naming those
            that have not answered. They may carry it out later.
        """
        self.check()
        number = next(self._numbers)
        waiting = self._open[number] = _Open(frozenset(self.live), asyncio.get_running_loop().create_future())
        try:
            self._ranks.order(order, number)
            async with asyncio.timeout(seconds):
                await waiting.answered
        except TimeoutError:
            silent = sorted(waiting.asked - set(waiting.done))
            raise DeadlineExceeded(f"{what}: ranks {silent} did not answer within {seconds:g} s") from None
        finally:
            del self._open[number]
        if refused := refusals(waiting.done):
            raise Unavailable(f"{what}: {refused}")
        return [waiting.done[rank] for rank in sorted(waiting.done)]

    async def alone(self, name: str, change: Callable[[], Awaitable[T]], seconds: float = TURN_SECONDS) -> T:
        """Makes a change of the ranks once no other one runs. It goes on if the caller leaves.

        Raises: WrongState while one of that name waits or runs; Unavailable if its turn does not come within
            `seconds`; as the change.
        """
        if name in self._begun:
            raise WrongState(f"another call of {name} runs")
        self._begun.add(name)
        try:
            async with asyncio.timeout(seconds):
                await self.changing.acquire()
        except TimeoutError:
            self._begun.discard(name)
            raise Unavailable(
                f"the ranks still prepare another change after {seconds:g} s: nothing has changed, try again"
            ) from None
        except BaseException:
            self._begun.discard(name)
            raise
        running = asyncio.ensure_future(change())

        def over(_: object) -> None:
            self._begun.discard(name)
            self.changing.release()

        running.add_done_callback(over)
        return await asyncio.shield(running)

    def on_done(self, rank: int, done: OrderDone) -> None:
        """An answer; one that nobody waits for any more is dropped."""
        waiting = self._open.get(done.number)
        if waiting is None:
            return
        waiting.done[rank] = done
        if waiting.asked <= set(waiting.done) and not waiting.answered.done():
            waiting.answered.set_result(None)

    def end(self, error: EpServerError) -> None:
        """The ranks answer no more: every wait ends with `error`, and a new order too, until begin()."""
        self._over = error
        for waiting in self._open.values():
            if not waiting.answered.done():
                waiting.answered.set_exception(error)

    def check(self) -> None:
        """Raises: the error of end(), until begin()."""
        if self._over is not None:
            raise self._over

    def begin(self) -> None:
        """New ranks answer."""
        self._over = None
