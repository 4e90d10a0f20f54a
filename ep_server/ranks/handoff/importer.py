"""Fetches KV rows from ranks of other servers into blocks of this rank's cache, in threads of its own.

What has arrived when a fetch fails is used; the rest is computed here. Units: tokens, bytes, seconds.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ep_server.backends.kv_rows import KvRows
from ep_server.ranks.handoff.wire import (
    DONE,
    SLOTS,
    TAKEN,
    HandoffError,
    Hello,
    Line,
    Rows,
    bytes_of,
    connect,
    receive_answer,
    slot_rows,
)
from ep_server.scheduler.handoffs import KvFetch

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Fetching:
    """One fetch. arrived: tokens, in order. dropped: its blocks belong to others now."""

    fetch: KvFetch
    after: Any
    began: float
    writing: threading.Lock = field(default_factory=threading.Lock)
    arrived: int = 0
    dropped: bool = False


class KvImporter:
    """Of one rank."""

    def __init__(self, rows: KvRows, timeout: float, silence: float) -> None:
        """timeout: of a whole fetch. silence: of the other server."""
        self._rows, self._timeout, self._silence = rows, timeout, silence
        self._running: dict[int, _Fetching] = {}  # by ticket
        self._ended: list[_Fetching] = []
        self._lock = threading.Lock()
        self._some = threading.Event()
        self._counts: Counter[str] = Counter()

    def start(self, fetches: Iterable[KvFetch]) -> None:
        """Begins to fill blocks, behind all steps launched so far."""
        for fetch in fetches:
            if not fetch.blocks:
                threading.Thread(target=self._release, args=(fetch,), daemon=True, name="kv-free").start()
                continue
            each = _Fetching(fetch, self._rows.mark(), time.monotonic())
            self._running[fetch.ticket] = each
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
                self._fetch(each)
            complete = True
        except HandoffError as error:
            if not each.dropped:
                log.warning("no KV from %s, computing the prompt here: %s", source.address, error)
        except Exception:
            log.exception("no KV from %s, computing the prompt here", source.address)
        with self._lock:
            self._ended.append(each)
            if not each.dropped:
                self._counts["handoffs/received" if complete else "handoffs/failed"] += 1
                self._counts["handoff_bytes/received"] += each.arrived * self._rows.row_bytes
                self._counts["handoff_ns"] += int((time.monotonic() - each.began) * 1e9)
            self._some.set()

    def _release(self, fetch: KvFetch) -> None:
        """Has the other server free its blocks; if it does not answer, it frees them later."""
        with suppress(HandoffError):
            line, _ = connect(fetch.source.address, fetch.source.local, self._silence)
            with closing(line):
                line.put(Hello(fetch.source.key, 0, 0, self._rows.row_bytes, shared=False).pack())
                receive_answer(line)

    def _fetch(self, each: _Fetching) -> None:
        """Raises: HandoffError."""
        fetch, row_bytes = each.fetch, self._rows.row_bytes
        end = fetch.first + len(fetch.blocks) * self._rows.block_size
        line, local = connect(fetch.source.address, fetch.source.local, self._silence)
        with closing(line):
            line.put(Hello(fetch.source.key, fetch.first, end, row_bytes, local).pack())
            most, at = slot_rows(row_bytes, end - fetch.first), fetch.first
            slots = (_shared_slots if local else _own_slots)(line, most, row_bytes)
            while at < end:
                rows = Rows.receive(line)
                if time.monotonic() - each.began > self._timeout:
                    raise HandoffError(f"not complete after handoff.timeout_seconds = {self._timeout:g}")
                if each.dropped:
                    raise HandoffError("the request does not await it any more")
                if rows.count:
                    self._take(each, line, rows, slots, at, end, local=local)
                    at += rows.count
                    line.put(TAKEN)
            line.put(DONE)

    def _take(
        self,
        each: _Fetching,
        line: Line,
        rows: Rows,
        slots: list[torch.Tensor],
        at: int,
        end: int,
        *,
        local: bool,
    ) -> None:
        if rows.first != at or rows.count > min(end - at, len(slots[0])) or rows.slot >= len(slots):
            raise HandoffError(f"rows {rows.first} to {rows.first + rows.count} were not expected")
        slot = slots[rows.slot]
        if not local:
            line.fill(bytes_of(slot[: rows.count]))
        fetch, size = each.fetch, self._rows.block_size
        start = at - fetch.first
        places = [fetch.blocks[n // size] * size + n % size for n in range(start, start + rows.count)]
        with each.writing:
            if each.dropped:
                raise HandoffError("the request does not await it any more")
            self._rows.write(places, slot, each.after)
            each.arrived += rows.count


def _own_slots(line: Line, rows: int, row_bytes: int) -> list[torch.Tensor]:
    """Memory for the rows of one message at a time. Raises: HandoffError."""
    receive_answer(line)
    memory = torch.frombuffer(mmap.mmap(-1, rows * row_bytes), dtype=torch.uint8)
    return [memory.view(rows, row_bytes)] * SLOTS


def _shared_slots(line: Line, rows: int, row_bytes: int) -> list[torch.Tensor]:
    """The other server's memory, read-only for us by intent. Raises: HandoffError."""
    try:
        first, descriptors, _, _ = socket.recv_fds(line.sock, 1, 1)
    except OSError as error:
        raise HandoffError(f"reading failed: {error}") from error
    if not descriptors:
        receive_answer(_Prefixed(line, first))
        raise HandoffError("the other server sent no memory")
    try:
        receive_answer(_Prefixed(line, first))
        size = SLOTS * rows * row_bytes
        if os.fstat(descriptors[0]).st_size < size:
            raise HandoffError("the other server sent too little memory")
        memory = torch.frombuffer(mmap.mmap(descriptors[0], size), dtype=torch.uint8)
    finally:
        os.close(descriptors[0])
    return list(memory.view(SLOTS, rows, row_bytes))


class _Prefixed(Line):
    """A line whose first bytes were read already."""

    def __init__(self, line: Line, first: bytes) -> None:
        super().__init__(line.sock, line.sock.gettimeout() or 0.0)
        self._first = first

    def take(self, size: int) -> bytes:
        """As Line.take."""
        first, self._first = self._first[:size], self._first[size:]
        return first + super().take(size - len(first))
