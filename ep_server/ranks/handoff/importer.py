"""Fetches KV rows from ranks of other servers into blocks of this rank's cache, in threads of its own.

What has arrived when a fetch fails is used; the rest is computed here. Units: tokens, bytes, seconds.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ep_server.backends.kv_rows import HostSlots, Kind, KvRows, Slots, places_of
from ep_server.ranks.handoff.lanes import Lanes, LaneSlots
from ep_server.ranks.handoff.peers import Peers
from ep_server.ranks.handoff.wire import (
    DONE,
    SLOTS,
    TAKEN,
    HandoffError,
    Hello,
    Line,
    Moved,
    Rows,
    receive_answer,
)
from ep_server.scheduler.handoffs import KvFetch

log = logging.getLogger(__name__)

WRITE_SECONDS = 5.0  # for announced rows to be written here
PATHS = {
    Kind.PRIVATE: "tcp",
    Kind.SHARED: "shared_memory",
    Kind.DEVICE: "device",
    Kind.FABRIC: "libfabric",
}


@dataclass(slots=True, eq=False)
class _Fetching:
    """One fetch. arrived: tokens, in order. dropped: its blocks belong to others now."""

    fetch: KvFetch
    after: Any
    began: float
    writing: threading.Lock = field(default_factory=threading.Lock)
    arrived: int = 0
    dropped: bool = False

    def check(self) -> None:
        """Raises: HandoffError if nobody awaits it any more."""
        if self.dropped:
            raise HandoffError("the request does not await it any more")


class KvImporter:
    """Of one rank."""

    def __init__(self, rows: KvRows, timeout: float, silence: float, lanes: Lanes | None = None) -> None:
        """timeout: of a whole fetch. silence: of the other rank. lanes: as of KvExporter."""
        self._far = Kind.PRIVATE if lanes is None else Kind.FABRIC
        self._lanes = lanes
        self._rows, self._timeout = rows, timeout
        self._peers = Peers(silence, rows.row_bytes)
        self._running: dict[int, _Fetching] = {}  # by ticket
        self._ended: list[_Fetching] = []
        self._lock = threading.Lock()
        self._some = threading.Event()
        self._counts: Counter[str] = Counter()

    def start(self, fetches: Iterable[KvFetch]) -> None:
        """Begins to fill blocks, behind all steps launched so far."""
        for fetch in fetches:
            if not fetch.blocks:
                self._release(fetch)
                continue
            each = _Fetching(fetch, self._rows.mark(), time.monotonic())
            self._running[fetch.ticket] = each
            if self._peers.skips(fetch.source):
                self._end(each, "skipped")
                self._release(fetch)
                continue
            threading.Thread(target=self._run, args=(each,), daemon=True, name="kv-fetch").start()

    def drop(self, tickets: Iterable[int]) -> None:
        """These blocks get other owners: nothing is written to them once this returns."""
        for ticket in tickets:
            each = self._running.pop(ticket, None)
            if each is not None:
                with each.writing:
                    each.dropped = True
                self._counts["handoffs/dropped"] += 1

    def ended(self) -> list[tuple[int, int]]:
        """(ticket, tokens that arrived) of the fetches that have ended since the last call."""
        if not self._running:
            return []
        with self._lock:
            ended, self._ended = self._ended, []
            self._some.clear()
        found = [each for each in ended if self._running.pop(each.fetch.ticket, None) is not None]
        return [(each.fetch.ticket, each.arrived) for each in found]

    @property
    def runs(self) -> bool:
        """A fetch runs."""
        return bool(self._running)

    def wait(self, seconds: float) -> None:
        """Until a fetch has ended, no longer than this."""
        self._some.wait(seconds)

    def counters(self) -> dict[str, int]:
        """Cumulative, under the names of RankStatistics.counters."""
        with self._lock:
            return dict(self._counts)

    def _run(self, each: _Fetching) -> None:
        source, complete = each.fetch.source, False
        try:
            with torch.inference_mode():
                if not self._fetch(each):
                    self._fetch(each)
            complete = True
        except HandoffError as error:
            if not each.dropped:
                log.warning("no KV from %s, computing the prompt here: %s", source.address, error)
        except Exception:
            log.exception("no KV from %s, computing the prompt here", source.address)
        self._end(each, "received" if complete else "failed")
        if not complete and not each.dropped:  # else the scheduler says what becomes of the blocks
            self._peers.release(each.fetch.source)

    def _end(self, each: _Fetching, result: str) -> None:
        with self._lock:
            self._ended.append(each)
            if not each.dropped:
                self._counts[f"handoffs/{result}"] += 1
                self._counts["handoff_bytes/received"] += each.arrived * self._rows.row_bytes
                self._counts["handoff_ns"] += int((time.monotonic() - each.began) * 1e9)
            self._some.set()

    def _release(self, fetch: KvFetch) -> None:
        """Has the other rank free its blocks, in a thread."""
        threading.Thread(
            target=self._peers.release, args=(fetch.source,), daemon=True, name="kv-free"
        ).start()

    def _fetch(self, each: _Fetching) -> bool:
        """Returns: False if this must begin again, with memory of another kind. Raises: HandoffError."""
        fetch, best = each.fetch, self._rows.kind
        end = fetch.first + fetch.tokens
        with self._peers.line(fetch.source) as (line, local):
            line.until = each.began + self._timeout
            kind = best if local else self._far
            line.put(Hello(fetch.source.key, fetch.first, end, self._rows.row_bytes, kind).pack())
            try:
                slots = self._slots(each, line, end - fetch.first, local=local)
            except HandoffError as error:
                if self._rows.kind is best:
                    raise
                log.warning("KV goes through host memory from now on: %s", error)
                return False
            with self._lock:
                self._counts[f"handoff_fetches/{PATHS[slots.kind]}"] += 1
            moved, number = Moved(fetch.first, end, self._rows.parts), 0
            while not moved.complete:
                rows = Rows.receive(line)
                if time.monotonic() - each.began > self._timeout:
                    raise HandoffError(f"not complete after handoff.timeout_seconds = {self._timeout:g}")
                each.check()
                if rows.count:
                    if isinstance(slots, LaneSlots):
                        slots.receive(number, WRITE_SECONDS, line.check_open)
                    self._take(each, line, rows, slots, moved)
                    line.put(TAKEN)
                    number += 1
            line.put(DONE)
            return True

    def _slots(self, each: _Fetching, line: Line, rows: int, *, local: bool) -> Slots:
        """Where the rows will lie. Raises: HandoffError."""
        kind, descriptor = _receive_memory(each, line) if local else (receive_answer(line, each.check), -1)
        if kind is Kind.FABRIC and self._lanes is not None:
            lane = self._lanes.open(rows, self._rows.row_bytes)
            lane.meet(line)
            return lane
        if kind is not Kind.PRIVATE and descriptor < 0:
            raise HandoffError("the other server sent no memory")
        try:
            return self._rows.attach(kind, rows, SLOTS, descriptor)
        except (OSError, ValueError, RuntimeError) as error:
            raise HandoffError(f"the other server's memory cannot be mapped: {error}") from error
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _take(self, each: _Fetching, line: Line, rows: Rows, slots: Slots, moved: Moved) -> None:
        if not moved.fits(rows, slots.rows):
            raise HandoffError(f"{rows} was not expected")
        if isinstance(slots, HostSlots) and slots.kind is Kind.PRIVATE:
            size = rows.count * rows.parts * self._rows.row_bytes // self._rows.parts
            line.fill(slots.host(rows.slot, size))
        fetch, start = each.fetch, rows.first - each.fetch.first
        places = places_of(fetch.blocks, self._rows.block_size, start, rows.count)
        parts = slice(rows.part, rows.part + rows.parts)
        with each.writing:
            each.check()
            self._rows.write(places, parts, slots, rows.slot, each.after)
            moved.add(rows)
            each.arrived = moved.whole


def _receive_memory(each: _Fetching, line: Line) -> tuple[Kind, int]:
    """An answer over a local socket, with a descriptor of the memory. Raises: HandoffError."""
    found = list[int]()
    try:
        return receive_answer(line, each.check, found), found[0] if found else -1
    except HandoffError:
        for descriptor in found:
            os.close(descriptor)
        raise
