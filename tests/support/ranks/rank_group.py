"""Real rank processes under test: their configuration, a listener that remembers, and what they may leave.

Knows the launcher's contract (ranks.protocol) and /proc; nothing of how a rank works.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from ep_server.config import Config
from ep_server.errors import EpServerError
from ep_server.orders import OrderDone
from ep_server.ranks.protocol import GroupState
from ep_server.records import (
    KvEventBatch,
    LossCause,
    PromptLogprobs,
    RankReady,
    RankStatistics,
    Request,
    Sampling,
    Stopping,
    TokenEvent,
)

BLOCK_SIZE = 4


def rank_config(path: object, ranks: int, **fields: object) -> Config:
    """One thread per rank, float32, small blocks, no standby; fields by dotted name with __ for the dot."""
    values = {
        "model.path": str(path),
        "model.dtype": "float32",
        "parallel.ranks": ranks,
        "parallel.threads_per_rank": 1,
        "resilience.standby": 0,
        "scheduler.block_size": BLOCK_SIZE,
        "scheduler.kv_blocks": 128,
        "scheduler.max_step_tokens": 32,
    }
    return Config.from_values(values | {name.replace("__", "."): value for name, value in fields.items()})


def greedy(number: int, prompt: Sequence[int], max_new: int, **fields: object) -> Request:
    return Request(
        f"r{number}",
        number,
        tuple(prompt),
        Sampling(temperature=0.0),
        Stopping(max_new_tokens=max_new),
        **fields,
    )


def joined(parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
    """All parts of one prompt, which must follow each other from position 1 on."""
    at = 1
    for part in parts:
        assert part.start == at
        at += len(part.logprobs)
    columns = "logprobs", "top_ids", "top_logprobs"
    return PromptLogprobs(
        parts[0].number, 1, *([x for part in parts for x in getattr(part, name)] for name in columns)
    )


class Recorder:
    """Remembers all a group says. `until` waits for a condition over it."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ranks: dict[int, int] = {}
        self.scored: dict[int, list[PromptLogprobs]] = {}
        self.finished: list[int] = []
        self.freed: list[int] = []
        self.failed: dict[int, str] = {}
        self.ready: list[RankReady] = []  # what start() returned, where a test keeps it
        self.statistics: dict[int, RankStatistics] = {}
        self.kv_events: list[KvEventBatch] = []
        self.done: list[tuple[int, OrderDone]] = []
        self.lost: list[tuple[int, str]] = []
        self.left: list[int] = []
        self.groups: list[GroupState] = []
        self.causes: list[tuple[int, LossCause]] = []
        self.progress: list[tuple[int, str, int, int]] = []
        self._changed = asyncio.Event()

    def on_tokens(self, rank: int, events: Sequence[TokenEvent]) -> None:
        for event in events:
            self.tokens.setdefault(event.number, []).append(event.token_id)
            self.ranks[event.number] = rank
            if event.finish is not None:
                self.finished.append(event.number)
        self._changed.set()

    def on_prompt_logprobs(self, rank: int, scored: PromptLogprobs) -> None:
        self.scored.setdefault(scored.number, []).append(scored)

    def on_freed(self, rank: int, number: int) -> None:
        self.freed.append(number)
        self._changed.set()

    def on_request_failed(self, rank: int, number: int, error: EpServerError) -> None:
        self.failed[number] = str(error)
        self._changed.set()

    def on_statistics(self, statistics: RankStatistics) -> None:
        self.statistics[statistics.rank] = statistics
        self._changed.set()

    def on_running(self, rank: int, sequences: int) -> None:
        pass

    def on_begun(self, rank: int, numbers: Sequence[int], adding: int = 0, copied: int = 0) -> None:
        pass

    def on_kv_events(self, batch: KvEventBatch) -> None:
        self.kv_events.append(batch)
        self._changed.set()

    def on_order_done(self, rank: int, done: OrderDone) -> None:
        self.done.append((rank, done))
        self._changed.set()

    def on_rank_lost(self, rank: int, cause: LossCause) -> None:
        self.causes.append((rank, cause))

    def on_group(self, state: GroupState) -> None:
        self.groups.append(state)
        self._changed.set()

    def on_left(self, rank: int) -> None:
        self.left.append(rank)
        self._changed.set()

    def on_lost(self, rank: int, message: str, seconds: float) -> None:
        assert seconds >= 0
        self.lost.append((rank, message))
        self._changed.set()

    def on_progress(self, rank: int, stage: str, done: int, total: int) -> None:
        self.progress.append((rank, stage, done, total))

    async def until(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        """Raises TimeoutError; AssertionError if the group is lost while nobody waits for that."""
        async with asyncio.timeout(seconds):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def parked(self, ranks: int, work_number: int) -> None:
        """Until every rank has said that it parks after this work number, the last one submitted."""
        await self.until(lambda: self.counter("parked_at_work") == [work_number] * ranks)

    def counter(self, name: str) -> list[int]:
        """A counter of every rank that has reported."""
        return [self.statistics[rank].counters.get(name, 0) for rank in sorted(self.statistics)]


class Leftovers:
    """What this process holds now: children, descriptors, names in /dev/shm, mapped memory without a name."""

    def __init__(self) -> None:
        self.children = {child.pid for child in psutil.Process().children(recursive=True)}
        self.descriptors = {fd.name for fd in Path("/proc/self/fd").iterdir()}
        self.shm = shared_names()
        self.memfds = Path("/proc/self/maps").read_text().count("/memfd:")

    def new_since(self, before: Leftovers) -> dict[str, object]:
        """Empty if nothing is left. A number of descriptors is compared: they are reused."""
        more = len(self.descriptors) - len(before.descriptors)
        found = {
            "children": self.children - before.children,
            "descriptors": max(0, more),
            "shm": self._names_left(before),
            "memfds": max(0, self.memfds - before.memfds),
        }
        return {name: value for name, value in found.items() if value}

    def _names_left(self, before: Leftovers) -> set[str]:
        """New names that stay. Other tests run beside this one; what they name goes away with them."""
        left, end = self.shm - before.shm, time.monotonic() + 60
        while left and time.monotonic() < end:
            time.sleep(0.1)
            left &= shared_names()
        return left


def shared_names() -> set[str]:
    """Those in /dev/shm, without the endpoints that other test processes name (own_name())."""
    names = {file.name for file in Path("/dev/shm").iterdir()}
    return {name for name in names if not re.match(rf"ep-server-(?!{os.getpid()}-)\d+-", name)}


def alive(pids: Sequence[int]) -> list[int]:
    """Those that run; a zombie does not."""
    running = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                running.append(pid)
        except psutil.NoSuchProcess:
            continue
    return running
