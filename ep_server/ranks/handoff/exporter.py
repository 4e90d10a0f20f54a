"""Serves the KV rows of this rank's prompts to ranks of other servers, in threads of its own.

The rank's loop says what may be read (show()); once that call returns, nothing else is being read. So a block
never changes under a reader. Units: tokens, bytes, seconds.
"""

from __future__ import annotations

import array
import errno
import logging
import math
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from ep_server.backends.kv_rows import HostSlots, Kind, KvRows, Slots, places_of
from ep_server.config import HandoffConfig
from ep_server.ranks.handoff.lanes import Lanes, LaneSlots
from ep_server.ranks.handoff.steps import Steps
from ep_server.ranks.handoff.wire import (
    DONE,
    KEEPALIVE_SECONDS,
    NOTHING,
    SLOTS,
    WAITING,
    HandoffError,
    Hello,
    Line,
    Moved,
    Rows,
    answer,
    refusal,
)
from ep_server.scheduler.handoffs import HoldEnd, KvExport

log = logging.getLogger(__name__)

UNKNOWN_SECONDS = 2.0  # a key may arrive before its request has reached this rank
LAYER_SECONDS = 0.002  # how often a step is asked which layers it has written
AGAIN_SECONDS = 0.5  # after a connection that could not be taken
REMEMBERED = 1024  # keys that ended: refused at once
REASONS: dict[HoldEnd | None, str] = {  # in the answer to a fetcher
    HoldEnd.FETCHED: "the blocks were fetched already",
    HoldEnd.UNNEEDED: "a decode server said that it does not need the blocks",
    HoldEnd.EXPIRED: "the blocks expired",
}
GONE = "the blocks were given up or released, or the request was cancelled"
MAX_READERS = 64


@dataclass(slots=True, eq=False)
class _Shown:
    """One export. gone: why it may not be read any more. since: when it was held; None while it runs.

    step: the one that writes its last planned rows. over: why nobody fetches it any more.
    """

    export: KvExport
    step: int
    since: float | None = None
    gone: str = ""
    over: HoldEnd | None = None
    reading: threading.Lock = field(default_factory=threading.Lock)


class KvExporter:
    """Listens at `address` (host:port) and at the abstract Unix socket `local`."""

    def __init__(
        self,
        rows: KvRows,
        config: HandoffConfig,
        port: int,
        lanes: Lanes | None = None,
        *,
        beside: bool = False,
    ) -> None:
        """port: of this rank; 0 = any. Raises: OSError.

        lanes: to fetchers of other hosts that have them; None = TCP. beside: while another group of ranks has
        the port, listens at `local` alone.
        """
        self._rows, self._lanes, self._hold_seconds = rows, lanes, config.hold_seconds
        self._stall = config.stall_seconds  # also for a fetcher to take what it got
        self._steps = Steps(rows, self._stall)
        self._shown: dict[bytes, _Shown] = {}
        self._ended: OrderedDict[bytes, HoldEnd | None] = OrderedDict()  # by key; None: see GONE
        self._changed = threading.Condition()
        self._readers = threading.Semaphore(MAX_READERS)
        self._sent = self._handoffs = self._hold_ns = 0
        self._closed = False
        self._place, shown = (config.host, port), f"[{config.host}]" if ":" in config.host else config.host
        tcp = self._listen(quiet=beside and port > 0)
        self.address = f"{shown}:{port if tcp is None else tcp.getsockname()[1]}"
        self.local = f"ep-server-kv-{secrets.token_hex(12)}"
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind("\0" + self.local)
        unix.listen(MAX_READERS)
        self._listeners = [unix] if tcp is None else [unix, tcp]
        for listener in (unix, tcp):
            threading.Thread(target=self._accept, args=(listener,), daemon=True, name="kv-listen").start()

    def show(self, exports: Iterable[KvExport], *, step: bool = False) -> None:
        """What may be read from now on, and nothing else is. step: one was planned, which begins after it."""
        if step:
            self._steps.plan()
        now, listed = time.monotonic(), {export.key: export for export in exports}
        if not listed and not self._shown:
            return
        with self._changed:
            for key in self._shown.keys() - listed.keys():
                self._end(key, None)
            for key, export in listed.items():
                if key not in self._shown:
                    over = self._ended.get(key)  # freed before its request arrived here
                    self._shown[key] = _Shown(export, self._steps.planned, over=over)
                shown = self._shown[key]
                if shown.export != export:
                    with shown.reading:
                        if export.planned > shown.export.planned:
                            shown.step = self._steps.planned
                        shown.export = export
                if export.held and shown.since is None:
                    shown.since = now
            self._changed.notify_all()

    def finished(self) -> list[tuple[int, HoldEnd]]:
        """(number, why) of requests whose blocks nobody fetches any more."""
        oldest, found = time.monotonic() - self._hold_seconds, list[tuple[int, HoldEnd]]()
        with self._changed:
            for key, shown in list(self._shown.items()):
                why = shown.over
                if why is None and shown.since is not None and shown.since < oldest:
                    why = HoldEnd.EXPIRED
                if why is not None:
                    found.append((shown.export.number, why))
                    self._end(key, why)
        return found

    def rest(self) -> None:
        """No step runs until the next one is planned."""
        self._steps.rest()

    @property
    def shows(self) -> bool:
        """Something may be read."""
        return bool(self._shown)

    def counters(self) -> dict[str, int]:
        """Cumulative, under the names of RankStatistics.counters."""
        return {
            "handoffs/sent": self._handoffs,
            "handoff_bytes/sent": self._sent,
            "handoff_hold_ns": self._hold_ns,
        }

    def close(self) -> None:
        """Ends listening. Threads end with the process."""
        self._closed = True
        for listener in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
            listener.close()

    def _end(self, key: bytes, why: HoldEnd | None) -> None:
        shown = self._shown.pop(key)
        with shown.reading:  # a read in progress ends first
            shown.gone = REASONS.get(why, GONE)
        if shown.since is not None:
            self._hold_ns += int((time.monotonic() - shown.since) * 1e9)
        self._remember(key, why)
        self._changed.notify_all()

    def _remember(self, key: bytes, why: HoldEnd | None) -> None:
        self._ended[key] = why
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def _listen(self, *, quiet: bool) -> socket.socket | None:
        """None if the port is in use, and that is no error. Raises: OSError."""
        family = socket.AF_INET6 if ":" in self._place[0] else socket.AF_INET
        try:
            return socket.create_server(self._place, family=family, backlog=MAX_READERS)
        except OSError as error:
            if not quiet or error.errno != errno.EADDRINUSE:
                raise
            return None

    def _accept(self, listener: socket.socket | None) -> None:
        """None: first waits for the port."""
        while listener is None:
            time.sleep(AGAIN_SECONDS)
            if (listener := self._listen(quiet=True)) is not None:
                self._listeners.append(listener)
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("a hand-off cannot begin: %s", error)  # too many files are open, say
                time.sleep(AGAIN_SECONDS)
                continue
            try:
                threading.Thread(target=self._answer, args=(sock,), daemon=True, name="kv-serve").start()
            except RuntimeError as error:  # too many threads
                log.warning("a hand-off cannot begin: %s", error)
                sock.close()

    def _answer(self, sock: socket.socket) -> None:
        line = Line(sock, self._stall)
        try:
            with torch.inference_mode():
                self._serve(line)
        except HandoffError as error:
            log.info("a hand-off ended early: %s", error)
            with suppress(HandoffError):
                line.put(Rows(NOTHING, 0, 0).pack() + refusal(str(error)))
        except Exception:
            log.exception("a hand-off failed")
        finally:
            line.close()

    def _serve(self, line: Line) -> None:
        line.until = time.monotonic() + self._stall
        hello = Hello.receive(line)
        line.until = math.inf
        try:
            if hello.first == hello.end:
                self._free(hello.key)
                line.put(answer(Kind.PRIVATE))
                return
            shown = self._find(line, hello)
            self._take_place(line, shown)
        except HandoffError as error:
            line.put(refusal(str(error)))
            return
        try:
            self._send_all(line, hello, shown)
        finally:
            self._readers.release()

    def _take_place(self, line: Line, shown: _Shown) -> None:
        """Few fetches have memory at a time. Raises: HandoffError."""
        while not self._readers.acquire(timeout=KEEPALIVE_SECONDS):
            if shown.gone:
                raise HandoffError(shown.gone)
            line.put(WAITING)

    def _send_all(self, line: Line, hello: Hello, shown: _Shown) -> None:
        slots = self._offer(hello, local=line.sock.family == socket.AF_UNIX)
        try:
            _send_answer(line, slots)
        finally:
            slots.close()
        if isinstance(slots, LaneSlots):
            slots.meet(line)
        self._send(line, hello, shown, slots)
        if line.take(1) != DONE:
            raise HandoffError("the last answer is malformed")
        self._handoffs += 1
        with self._changed:
            shown.over = HoldEnd.FETCHED

    def _offer(self, hello: Hello, *, local: bool) -> Slots:
        """Raises: HandoffError."""
        count = hello.end - hello.first
        if hello.kind is Kind.FABRIC and self._lanes is not None:
            return self._lanes.open(count, self._rows.row_bytes)
        own = hello.kind if local and hello.kind is not Kind.FABRIC else Kind.PRIVATE
        return self._rows.offer(own, count, SLOTS)

    def _free(self, key: bytes) -> None:
        """Nobody fetches this; also if its request is still on its way to this rank."""
        with self._changed:
            if (shown := self._shown.get(key)) is not None:
                shown.over = shown.over or HoldEnd.UNNEEDED
            elif key not in self._ended:
                self._remember(key, HoldEnd.UNNEEDED)

    def _find(self, line: Line, hello: Hello) -> _Shown:
        """Raises: HandoffError."""
        if hello.row_bytes != self._rows.row_bytes:
            raise HandoffError(f"row_bytes = {hello.row_bytes}: must be {self._rows.row_bytes}")
        began = sent = time.monotonic()
        plans = self._steps.plans
        while True:
            with self._changed:
                if (shown := self._shown.get(hello.key)) is not None:
                    break
                late = time.monotonic() - began > UNKNOWN_SECONDS
                if hello.key in self._ended or (late and self._steps.have_read(plans)):
                    raise HandoffError(f"key unknown: {self._why(hello.key)}")
                self._steps.check()
                self._changed.wait(KEEPALIVE_SECONDS)
            if time.monotonic() - sent >= KEEPALIVE_SECONDS:
                line.put(WAITING)
                sent = time.monotonic()
        if shown.over is not None:
            raise HandoffError(REASONS[shown.over])
        return shown

    def _why(self, key: bytes) -> str:
        """A key is not shown. The reason for a fetcher."""
        return REASONS.get(self._ended[key], GONE) if key in self._ended else "no such request"

    def _send(self, line: Line, hello: Hello, shown: _Shown, slots: Slots) -> None:
        moved, sent, unread = Moved(hello.first, hello.end, self._rows.parts), 0, 0
        while not moved.complete:
            self._await(line, shown, moved)
            if unread == SLOTS:
                line.take(1)
                unread -= 1
            rows = self._read(shown, moved, slots, sent % SLOTS)
            if rows is not None:
                size = rows.count * rows.parts * self._rows.row_bytes // self._rows.parts
                line.put(rows.pack())
                if isinstance(slots, LaneSlots):
                    slots.send(rows.slot, size, sent, self._stall)
                elif isinstance(slots, HostSlots) and slots.kind is Kind.PRIVATE:
                    line.put(slots.host(rows.slot, size))
                moved.add(rows)
                sent, unread = sent + 1, unread + 1
                self._sent += size
        for _ in range(unread):
            line.take(1)

    def _read(self, shown: _Shown, moved: Moved, slots: Slots, slot: int) -> Rows | None:
        """Fills a slot with what is ready; None if that is nothing any more. Raises: HandoffError."""
        with shown.reading:
            if shown.gone:
                raise HandoffError(shown.gone)
            rows = moved.next(*self._ready(shown), slots.rows, slot)
            if rows is not None:
                places = places_of(shown.export.blocks, self._rows.block_size, rows.first, rows.count)
                self._rows.read(places, slice(rows.part, rows.part + rows.parts), slots, slot)
            return rows

    def _ready(self, shown: _Shown) -> tuple[int, int, int]:
        """(tokens computed, tokens of the steps in flight too, leading parts of these that are written)."""
        export = shown.export  # before its step, which is set first: of these rows, or of later ones
        return export.tokens, export.planned, self._rows.written(shown.step)

    def _await(self, line: Line, shown: _Shown, moved: Moved) -> None:
        """Waits until there is something to send. Raises: HandoffError, also where no step runs."""
        sent = time.monotonic()
        while True:
            with self._changed:
                if shown.gone:
                    raise HandoffError(shown.gone)
                if moved.next(*self._ready(shown), 1, 0) is not None:
                    return
                if shown.export.held:
                    raise HandoffError(f"the prompt has {shown.export.tokens} tokens")
                self._steps.check()
                runs = shown.export.planned > shown.export.tokens
                self._changed.wait(LAYER_SECONDS if runs else KEEPALIVE_SECONDS)
            if time.monotonic() - sent >= KEEPALIVE_SECONDS:
                line.put(Rows(moved.first, 0, 0).pack())
                sent = time.monotonic()


def _send_answer(line: Line, slots: Slots) -> None:
    """Raises: HandoffError."""
    if slots.descriptor < 0:
        line.put(answer(slots.kind))
        return
    try:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [slots.descriptor]))]
        line.sock.sendmsg([answer(slots.kind)], rights)
    except OSError as error:
        raise HandoffError(f"sending the memory failed: {error}") from error
