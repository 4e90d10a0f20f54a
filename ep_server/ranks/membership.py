"""One rank among those that take part: exchange and routes of experts, from generation to generation."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from ep_server.errors import CheckpointError, InternalError, PeerTimeout
from ep_server.ranks.messages import placement_of
from ep_server.scheduler.placement import Placement
from ep_server.v1 import rank_pb2 as pb

if TYPE_CHECKING:  # they import torch
    from ep_server.ranks.build import RankParts

log = logging.getLogger(__name__)

READ_SECONDS, AGAIN_SECONDS = 5.0, 0.5


class RankMembership:
    """Used in the thread of the rank's loop, while no step is in flight."""

    def __init__(self, parts: RankParts) -> None:
        """parts.experts is None where they stay, so that all ranks take part."""
        self._exchange, self._experts = parts.exchange, parts.experts
        self._overlap, self._modes, self._lost_kv = parts.overlap, parts.modes, parts.lost_kv
        membership = parts.exchange.membership
        self._lead(range(parts.exchange.spec.num_ranks) if membership is None else membership.live)

    def regroup(
        self, order: pb.Regroup, alive: Callable[[], None], stands: Callable[[], bool]
    ) -> pb.FromRank | None:
        """Reads the experts that an order gives this rank, and goes on with the ranks that it names.

        Args:
            alive: called now and then, so that nobody thinks that this rank hangs.
            stands: whether the order does, asked again and again while other ranks still read experts.
        Returns: the answer; None if the order stands no more.
        Raises: CheckpointError; PeerLost, GroupAborted if a rank is lost meanwhile; InternalError.
        """
        began = time.monotonic()
        placement = placement_of(order.placement) if order.HasField("placement") else None
        if placement is not None and not self._load(placement, alive, stands):
            return None
        self._lost_kv.offer(order.lost_kv)
        seconds = time.monotonic() - began
        while True:
            try:
                self.enter(order.generation, order.live, placement)
            except PeerTimeout:
                alive()
                if not stands():
                    return None
            else:
                done = pb.Regrouped(generation=order.generation, load_seconds=seconds)
                return pb.FromRank(regrouped=done)

    def _load(self, placement: Placement, alive: Callable[[], None], stands: Callable[[], bool]) -> bool:
        """Reads experts; again for some seconds if files cannot be read: storage may fail for a moment.

        Returns: False if the order stands no more. Raises: as regroup().
        """
        until = time.monotonic() + READ_SECONDS
        while self._experts is not None:
            try:
                self._experts.load(placement, idle=True, alive=alive)
                break
            except CheckpointError as error:
                if time.monotonic() > until:
                    raise
                log.warning("%s; reading again in %g s", error, AGAIN_SECONDS)
            time.sleep(AGAIN_SECONDS)
            alive()
            if not stands():
                return False
        return True

    def enter(self, generation: int, live: Collection[int], placement: Placement | None) -> None:
        """Begins a generation with these ranks. Collective.

        Raises: PeerTimeout if one does not come; PeerLost if one is lost meanwhile; InternalError.
        """
        membership = self._exchange.membership
        if membership is None:
            raise InternalError("this exchange cannot regroup")
        everyone = range(self._exchange.spec.num_ranks)
        if self._experts is not None and placement is not None:
            self._experts.use(placement, live)
            self._experts.waits = False
        membership.reset([rank for rank in everyone if rank not in live], generation)
        self._lead(live)

    def _lead(self, live: Collection[int]) -> None:
        self._modes.regrouped()
        self._overlap.lead(leads=self._exchange.spec.rank == min(live))
