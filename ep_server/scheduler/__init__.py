"""Scheduling decisions as pure code: no torch, gRPC, asyncio or clock; imports errors and records only."""

from ep_server.scheduler.batch import SchedulerLimits
from ep_server.scheduler.placement import choose_rank, place_experts
from ep_server.scheduler.rank_scheduler import RankScheduler

__all__ = ["RankScheduler", "SchedulerLimits", "choose_rank", "place_experts"]
