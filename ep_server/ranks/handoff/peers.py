"""Connections to ranks of other servers, and which of them do not answer. Threads share it. Units: seconds.

A rank that works sends something twice a second, however long its prefill takes. One that sends nothing over
any connection for `silence` seconds is silent: every wait for it ends, nobody waits for it again, and one
thread asks it until it answers.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from ep_server.backends.kv_rows import Kind
from ep_server.ranks.handoff.wire import (
    KEY_BYTES,
    HandoffError,
    Hello,
    Line,
    Silent,
    connect,
    receive_answer,
)
from ep_server.records import KvSource

log = logging.getLogger(__name__)

ASK_SECONDS = 10.0  # for one question: a stopped process answers it when it goes on
AGAIN_SECONDS = 1.0  # between two questions at least
FORGET_SECONDS = 600.0  # after the last request that named it
MAX_SILENT = 64
MAX_UNSENT = 1024  # keys to free at a silent rank


class _Place(NamedTuple):
    address: str
    local: str


@dataclass(slots=True, eq=False)
class _Peer:
    """received: when the lines that have ended got something last. asked: when a request named it last.

    unsent: keys that it may free. skipped: requests that did not wait for it.
    """

    lines: set[Line] = field(default_factory=set)
    received: float = -math.inf
    silent: bool = False
    asked: float = 0.0
    skipped: int = 0
    unsent: dict[bytes, None] = field(default_factory=dict)

    @property
    def last(self) -> float:
        """When it sent something last."""
        return max([self.received, *(line.received for line in self.lines)])


class Peers:
    """Of one rank."""

    def __init__(self, silence: float, row_bytes: int) -> None:
        """row_bytes: of this rank's cache."""
        self._silence, self._row_bytes = silence, row_bytes
        self._peers: dict[_Place, _Peer] = {}  # with a line, or silent
        self._lock = threading.Lock()

    def skips(self, source: KvSource) -> bool:
        """Whether a request must not wait for this rank now."""
        with self._lock:
            peer = self._peers.get(_place(source))
            if peer is None or not peer.silent:
                return False
            peer.asked = time.monotonic()
            peer.skipped += 1
            return True

    @contextmanager
    def line(self, source: KvSource) -> Iterator[tuple[Line, bool]]:
        """As connect(). Raises: HandoffError; so does every wait for the line once the rank is silent."""
        place = _place(source)
        try:
            line, local = connect(*place, self._silence)
        except Silent:
            self._missed(place)
            raise
        with self._lock:
            self._peers.setdefault(place, _Peer()).lines.add(line)
        try:
            yield line, local
        except Silent:
            self._missed(place)
            raise
        finally:
            self._leave(place, line)
            line.close()

    def release(self, source: KvSource) -> None:
        """Has a rank free its blocks; one that is silent, as soon as it answers."""
        if self._keeps(source):
            return
        try:
            with self.line(source) as (line, _):
                self._ask(line, source.key)
        except HandoffError:
            self._keeps(source)  # this was the first call to notice that it is silent

    def _keeps(self, source: KvSource) -> bool:
        """Whether the rank is silent. It then gets the key once it answers."""
        with self._lock:
            peer = self._peers.get(_place(source))
            if peer is None or not peer.silent:
                return False
            if len(peer.unsent) < MAX_UNSENT:
                peer.unsent[source.key] = None
            return True

    def _ask(self, line: Line, key: bytes) -> None:
        """Raises: HandoffError; also where a rank refuses."""
        line.until = time.monotonic() + ASK_SECONDS
        line.put(Hello(key, 0, 0, self._row_bytes, Kind.PRIVATE).pack())
        receive_answer(line)

    def _leave(self, place: _Place, line: Line) -> None:
        with self._lock:
            peer = self._peers[place]
            peer.lines.discard(line)
            peer.received = max(peer.received, line.received)
            if not peer.lines and not peer.silent:
                del self._peers[place]

    def _missed(self, place: _Place) -> None:
        """A wait for this rank timed out. If it sends nothing to others either, it is silent."""
        now = time.monotonic()
        with self._lock:
            peer = self._peers.setdefault(place, _Peer())
            if not peer.silent and now - peer.last < self._silence:
                return  # alive, and only this wait was too long
            for line in peer.lines:
                line.end("it sends nothing to other requests either")
            if peer.silent:
                return
            peer.silent, peer.asked = True, now
            silent = [each for each, other in self._peers.items() if other.silent]
            if len(silent) > MAX_SILENT:
                self._forget(min(silent, key=lambda each: self._peers[each].asked))
        log.warning("%s does not answer: computing prompts here until it does", place.address)
        try:
            threading.Thread(target=self._watch, args=(place, peer), daemon=True, name="kv-ask").start()
        except RuntimeError as error:  # then nobody would ask it: the next request tries it
            log.warning("%s cannot be asked: %s", place.address, error)
            with self._lock:
                if peer.silent:
                    self._forget(place)

    def _forget(self, place: _Place) -> None:
        """It is tried again. Under the lock."""
        self._peers[place].silent = False
        if not self._peers[place].lines:
            del self._peers[place]

    def _watch(self, place: _Place, peer: _Peer) -> None:
        """Until it answers, is gone, or nobody asks for it any more."""
        began = time.monotonic()
        while peer.silent and not self._answers(place, peer):
            with self._lock:
                if peer.silent and time.monotonic() - peer.asked > FORGET_SECONDS:
                    self._forget(place)
        with self._lock:
            if not peer.silent:
                return
            self._forget(place)
            unsent, skipped = list(peer.unsent), peer.skipped
        took = time.monotonic() - began
        log.info("%s is used again after %.1f s: %d requests did not wait", place.address, took, skipped)
        for key in unsent:
            self.release(KvSource(*place, key, 0))

    def _answers(self, place: _Place, peer: _Peer) -> bool:
        """Asks once, with the oldest key that it may free."""
        began = time.monotonic()
        with self._lock:
            key = next(iter(peer.unsent), None) or secrets.token_bytes(KEY_BYTES)
        try:
            line, _ = connect(*place, ASK_SECONDS)
            try:
                self._ask(line, key)
            finally:
                line.close()
        except Silent:
            time.sleep(max(0.0, AGAIN_SECONDS - (time.monotonic() - began)))
            return False
        except HandoffError:  # closed or refused: that takes no time, so requests may try again
            pass
        with self._lock:
            peer.unsent.pop(key, None)
        return True


def _place(source: KvSource) -> _Place:
    return _Place(source.address, source.local)
