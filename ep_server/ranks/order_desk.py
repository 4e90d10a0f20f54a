"""Carries out the orders that a rank gets between two steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ep_server.errors import WrongState
from ep_server.orders import (
    DropChange,
    FlushCache,
    OrderDone,
    PrepareWeights,
    RankOrder,
    ReleaseKv,
    StartProfile,
    SwitchChange,
)
from ep_server.ranks.changes import Change, Changes
from ep_server.ranks.messages import one_line
from ep_server.scheduler.rank_scheduler import RankScheduler

if TYPE_CHECKING:  # it imports torch
    from ep_server.ranks.profiler import StepProfiler

log = logging.getLogger(__name__)


class OrderDesk:
    """changes: the one that this rank prepares, if any. Used in the thread of the rank's loop."""

    def __init__(
        self,
        scheduler: RankScheduler,
        profiler: StepProfiler,
        new_weights: Callable[[str, int], Change] | None,
    ) -> None:
        """new_weights: makes the change to the weights of a path and version; None if they cannot change."""
        self.changes = Changes()
        self._scheduler, self._profiler, self._new_weights = scheduler, profiler, new_weights

    def obey(self, order: RankOrder, number: int) -> OrderDone | None:
        """Carries out an order. Returns: the answer; None where `changes` gives it later."""
        try:
            return self._carry_out(order, number)
        except Exception as error:  # the rank continues: a failed order must not end its requests
            log.exception("%s could not be carried out", order)
            return OrderDone(number, error=one_line(error))

    def _carry_out(self, order: RankOrder, number: int) -> OrderDone | None:
        if isinstance(order, PrepareWeights):
            if self._new_weights is None:
                raise WrongState("ranks on GPUs cannot take new weights; start the server again with them")
            self.changes.prepare(order.change, number, self._new_weights(order.path, order.version))
            return None
        if isinstance(order, SwitchChange):
            self.changes.offer(order.change, number)
            return None
        if isinstance(order, DropChange):
            self.changes.drop(order.change)
        elif isinstance(order, ReleaseKv):
            return OrderDone(number, blocks=self._scheduler.handoffs.release(order.key))
        elif isinstance(order, FlushCache):
            return OrderDone(number, blocks=self._scheduler.flush_cache())
        elif isinstance(order, StartProfile):
            self._profiler.start(order)
        else:
            return OrderDone(number, files=self._profiler.stop())
        return OrderDone(number)
