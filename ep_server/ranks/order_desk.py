"""Carries out the orders that a rank gets between two steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ep_server.errors import EpServerError, InternalError, WrongState
from ep_server.orders import (
    CountExperts,
    DropChange,
    FlushCache,
    OrderDone,
    Prepare,
    PrepareGeneration,
    PreparePlacement,
    PrepareWeights,
    RankOrder,
    ReleaseKv,
    StartProfile,
    SwitchChange,
)
from ep_server.ranks.changes import Change, Changes
from ep_server.ranks.messages import one_line

if TYPE_CHECKING:  # they import torch
    from ep_server.ranks.build import RankParts
    from ep_server.ranks.experts import RankExperts

log = logging.getLogger(__name__)


class OrderDesk:
    """changes: the one that this rank prepares, if any. Used in the thread of the rank's loop."""

    def __init__(
        self, parts: RankParts, enter: Callable[[PrepareGeneration], None] = lambda order: None
    ) -> None:
        """enter: regroups the rank."""
        self.changes, self._moving, self._enter = Changes(), parts.experts, enter
        self._scheduler, self._profiler = parts.scheduler, parts.profiler
        self._new_weights = parts.new_weights

    def obey(self, order: RankOrder, number: int) -> OrderDone | None:
        """Carries out an order. Returns: the answer; None where `changes` gives it later."""
        try:
            return self._carry_out(order, number)
        except Exception as error:  # the rank continues: a failed order must not end its requests
            refused = isinstance(error, EpServerError) and not isinstance(error, InternalError)
            log.warning("%s is not carried out: %s", type(order).__name__, error, exc_info=not refused)
            return OrderDone(number, error=one_line(error))

    def _carry_out(self, order: RankOrder, number: int) -> OrderDone | None:
        if isinstance(order, PrepareWeights | PreparePlacement | PrepareGeneration):
            self.changes.prepare(order.change, number, self._change(order))
            return None
        if isinstance(order, SwitchChange):
            self.changes.offer(order.change, number)
            return None
        return self._at_once(order, number)

    def _at_once(self, order: RankOrder, number: int) -> OrderDone:
        if isinstance(order, DropChange):
            self.changes.drop(order.change)
        elif isinstance(order, ReleaseKv):
            return OrderDone(number, blocks=self._scheduler.handoffs.release(order.key))
        elif isinstance(order, FlushCache):
            return OrderDone(number, blocks=self._scheduler.flush_cache())
        elif isinstance(order, CountExperts):
            return OrderDone(number, rows=self._experts.rows())
        elif isinstance(order, StartProfile):
            self._profiler.start(order)
        else:
            return OrderDone(number, files=self._profiler.stop())
        return OrderDone(number)

    def _change(self, order: Prepare) -> Change:
        if isinstance(order, PreparePlacement):
            return self._experts.change(order.placement)
        if isinstance(order, PrepareGeneration):
            return self._experts.generation(order, partial(self._enter, order))
        return self._new_weights(order.path, order.version, order.files)

    @property
    def _experts(self) -> RankExperts:
        if self._moving is None:
            raise WrongState("experts cannot move: there are no spare slots (resilience.spare_slots)")
        return self._moving
