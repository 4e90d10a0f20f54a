"""Balance of experts while requests run: counts rows, plans, and has all ranks switch to another placement.

A change is prepared in the background: ranks load experts into slots that serve nothing. Then all switch
before the same step. Until then nothing has changed, and an error leaves it so. Used in one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from ep_server.config.sections import ResilienceConfig
from ep_server.engine.observer import EngineObserver
from ep_server.engine.rank_orders import RankOrders
from ep_server.errors import EpServerError, Unavailable
from ep_server.orders import CountExperts, DropChange, PreparePlacement, SwitchChange
from ep_server.ranks.protocol import THREAD_TURN_SECONDS, GroupState
from ep_server.scheduler.balance import BalanceLimits, Plan, imbalance, plan_balance
from ep_server.scheduler.placement import Placement

log = logging.getLogger(__name__)

COUNT_SECONDS, PREPARE_SECONDS, SWITCH_SECONDS, DROP_SECONDS = 30.0, 600.0, 60.0, 10.0
KEPT = 0.5  # of the rows counted before, in those that the next plan sees

Rows = list[list[float]]  # by layer, by expert


@dataclass(frozen=True, slots=True)
class BalanceSettings:
    """seconds: between two plans."""

    seconds: float = 10.0
    limits: BalanceLimits = field(default_factory=BalanceLimits)


def balance_settings(config: ResilienceConfig) -> BalanceSettings | None:
    """None where nothing is to be balanced."""
    if config.balance == "off":
        return None
    return BalanceSettings(config.balance_seconds, BalanceLimits(moves=config.balance_moves))


class Group(Protocol):
    """The ranks: orders to them, and what they last said of themselves; None before, or if experts stay."""

    orders: RankOrders
    group: GroupState | None


class Balancer:
    """placement: of the experts now, None where they stay. live: ranks that serve."""

    def __init__(
        self,
        ranks: Group,
        settings: BalanceSettings | None,
        observer: EngineObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """settings: None: nothing is counted or moved."""
        self._ranks, self._settings, self._observer, self._clock = ranks, settings, observer, clock
        self._seen: GroupState | None = None
        self._placement: Placement | None = None
        self._counted: dict[int, tuple[int, ...]] = {}  # by position among the answers: cumulative rows
        self._rows: Rows = []
        self._task: asyncio.Task[None] | None = None

    @property
    def placement(self) -> Placement | None:
        """Of the experts now; None where they stay."""
        if self._ranks.group is not self._seen:  # another generation
            self._seen, self._counted = self._ranks.group, {}
            self._placement = None if self._seen is None else self._seen.placement
        return self._placement

    @property
    def live(self) -> tuple[int, ...]:
        """Ranks that serve experts."""
        return () if self._ranks.group is None else self._ranks.group.live

    @property
    def moving(self) -> bool:
        """Ranks load experts, or are about to switch."""
        return self._ranks.orders.changing.locked()

    @property
    def rows(self) -> Rows:
        """By layer, by expert: rows of the last periods, newer ones with more weight. Empty: not counted."""
        return self._rows

    def start(self) -> None:
        """The ranks serve: begins to count, if that is wanted."""
        if self._settings is not None and self._task is None and self.placement is not None:
            self._task = asyncio.get_running_loop().create_task(self._run(self._settings))

    def stop(self) -> None:
        """Moves nothing any more. A change that is under way is left to the ranks."""
        if self._task is not None:
            self._task.cancel()

    async def count_rows(self) -> list[tuple[int, ...]]:
        """By live rank: rows that it received by layer and by expert, end to end, cumulative.

        Raises: Unavailable if experts stay or a rank is lost; DeadlineExceeded.
        """
        answers = await self._ranks.orders.give(CountExperts(), COUNT_SECONDS, "counting rows of experts")
        return [done.rows for done in answers]

    async def _run(self, settings: BalanceSettings) -> None:
        while True:
            await asyncio.sleep(settings.seconds)
            try:
                await self._balance(settings.limits)
            except EpServerError as error:
                log.warning("experts stay where they are: %s", error)
            except Exception:
                log.exception("experts stay where they are")

    async def _balance(self, limits: BalanceLimits) -> None:
        before, live = self.placement, self.live
        if before is None or len(live) < 2:
            return
        measured = await self._count(before.num_experts)
        if measured is None:
            return
        plan = await asyncio.to_thread(_plan, self._rows, before, live, limits)
        if plan.placement != before:
            async with self._ranks.orders.changing:
                await self._switch(before, plan, measured)

    async def _count(self, experts: int) -> float | None:
        """Counts rows since the last time. Returns: the imbalance of ranks; None without any rows."""
        before, self._counted = self._counted, dict(enumerate(await self.count_rows()))
        news = [
            [count - earlier for count, earlier in zip(rows, before.get(number, rows), strict=True)]
            for number, rows in self._counted.items()
        ]
        if min(map(min, news)) < 0:  # a rank has started again meanwhile
            return None
        layers = range(0, len(news[0]), experts)
        self._rows = self._rows or [[0.0] * experts for _ in layers]
        for kept, first in zip(self._rows, layers, strict=True):
            for expert in range(experts):
                kept[expert] = KEPT * kept[expert] + sum(rank[first + expert] for rank in news)
        loads = [[sum(rank[first : first + experts]) for rank in news] for first in layers]
        busy = [each for each in loads if sum(each)]
        if not busy:
            return None
        mean = sum(map(max, busy)) * len(news) / sum(map(sum, busy))
        self._observer.on_imbalance(mean, max(map(imbalance, busy)))
        return mean

    async def _switch(self, before: Placement, plan: Plan, measured: float) -> None:
        orders, change, began = self._ranks.orders, next(self._ranks.orders.changes), self._clock()
        what = "moving experts"
        try:
            await orders.give(PreparePlacement(change, plan.placement), PREPARE_SECONDS, what)
            orders.check()
            if self.placement is not before:
                raise Unavailable("other ranks serve meanwhile")
        except EpServerError:
            with suppress(EpServerError):
                await orders.give(DropChange(change), DROP_SECONDS, "dropping a placement")
            raise
        self._placement = plan.placement
        self._observer.on_experts_moved(len(plan.moves))
        try:
            done = await orders.give(SwitchChange(change), SWITCH_SECONDS, what)
        except EpServerError as error:
            moved = "balance: loaded %d experts, but not all ranks have reported that they use them: %s"
            log.warning(moved, len(plan.moves), error)
            return
        log.info(
            "balance: maximum / mean rows of ranks %.3f before; loaded %d experts in %.2f s, paused %.1f ms",
            measured,
            len(plan.moves),
            self._clock() - began,
            max(one.seconds for one in done) * 1000,
        )


def _plan(rows: Rows, placement: Placement, live: tuple[int, ...], limits: BalanceLimits) -> Plan:
    """plan_balance() in a thread beside the event loop, which hardly waits for it."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(THREAD_TURN_SECONDS)
    try:
        return plan_balance(rows, placement, live, limits)
    finally:
        sys.setswitchinterval(usual)
