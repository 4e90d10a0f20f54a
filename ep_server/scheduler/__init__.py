"""Scheduling decisions as pure code: no torch, gRPC, asyncio or clock; imports errors and records only."""

from ep_server.records import EMPTY
from ep_server.scheduler.batch import SchedulerLimits
from ep_server.scheduler.placement import (
    Placement,
    choose_rank,
    first_placement,
    place_experts,
    slots_lacking,
    slots_needed,
)
from ep_server.scheduler.rank_scheduler import RankScheduler

__all__ = [
    "EMPTY",
    "Placement",
    "RankScheduler",
    "SchedulerLimits",
    "choose_rank",
    "first_placement",
    "place_experts",
    "slots_lacking",
    "slots_needed",
]
