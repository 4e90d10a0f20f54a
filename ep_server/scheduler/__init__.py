"""Scheduling decisions as pure code: imports errors and records only; no torch, gRPC, asyncio or clock."""

from ep_server.scheduler.batch import IDLE, SchedulerLimits, split_batch
from ep_server.scheduler.rank_scheduler import RankScheduler

__all__ = ["IDLE", "RankScheduler", "SchedulerLimits", "split_batch"]
