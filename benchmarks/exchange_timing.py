"""Times of work on GPUs: graphs replayed many times, the slowest rank counts. Microseconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

OPERATIONS = 20  # of a graph
WARM_UP = 10  # replays


@dataclass(frozen=True)
class Time:
    median: float
    p99: float

    def __str__(self) -> str:
        return f"{self.median:.1f} ({self.p99:.1f})"


@dataclass(frozen=True)
class Timer:
    """group: gloo, of the ranks that measure together. Every method is collective."""

    group: dist.ProcessGroup
    replays: int

    def graph(self, enqueue: Callable[[], object], calls: int = OPERATIONS) -> Time:
        """One operation of a graph that calls `enqueue` `calls` times and holds OPERATIONS operations."""
        enqueue()
        self.together()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                enqueue()
        for _ in range(WARM_UP):
            graph.replay()
        self.together()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(self.replays + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        times = torch.tensor([a.elapsed_time(b) for a, b in pairwise(events)]) * 1e3 / OPERATIONS
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=self.group)
        return Time(float(times.quantile(0.5)), float(times.quantile(0.99)))

    def together(self) -> None:
        """All ranks and their GPUs have come here."""
        torch.cuda.synchronize()
        dist.barrier(self.group)

    def most(self, values: dict[str, float]) -> dict[str, float]:
        """Each value's maximum over the ranks that have it."""
        found: list[dict[str, float]] = [{} for _ in range(dist.get_world_size(self.group))]
        dist.all_gather_object(found, values, group=self.group)
        return {
            name: max(each[name] for each in found if name in each) for name in sorted(set().union(*found))
        }
