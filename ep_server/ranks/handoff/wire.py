"""What two ranks of different servers say to each other while KV rows move. Both ends check every length.

    fetcher -> holder   Hello: which rows of which key, in what format
    holder -> fetcher   WAITING twice a second until it can answer
    holder -> fetcher   Answer: the kind of memory, with its descriptor over a local socket; or why not
    both, over libfabric: where their memory is
    holder -> fetcher   Rows: some parts of `count` rows from `first` on, layer by layer where these are
                        known; their bytes follow, or lie in slot `slot` of shared memory, or are written
                        into it, with a number that counts from 0. count 0: still computing. first NOTHING:
                        it ended, an Answer follows
    fetcher -> holder   one byte per Rows with rows: the slot may be used again; DONE after the last

Numbers are little-endian. Units: tokens (a row each), bytes, seconds.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from ep_server.backends.kv_rows import Kind
from ep_server.errors import Unavailable

MAGIC = 0x31564B45  # "EKV1"
KEY_BYTES = 16
NOTHING = 0xFFFFFFFF
REFUSED, WAIT = 0xFF, 0xFE  # in place of a kind
KEEPALIVE_SECONDS = 0.5  # between two signs of life of a holder
PIECE_BYTES = 1 << 18  # of a long message; each has the whole time to be sent
UNREACHABLE = (errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH)
TAKEN, DONE = b"t", b"d"
MAX_REASON = 256
LAST_PORT = 65_535  # larger ones would be taken modulo 65,536
SLOTS = 2  # of the memory for rows: one is filled while the other is read

_HELLO = struct.Struct(f"<I{KEY_BYTES}sIIIB")
_ANSWER = struct.Struct("<BH")
_ROWS = struct.Struct("<IIIII")
WAITING = _ANSWER.pack(WAIT, 0)


class HandoffError(Unavailable):
    """The other end is gone, refuses, or sent what it must not."""


class Silent(HandoffError):
    """The other end sends nothing, and its host does not say that it is gone."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Asks for the rows `first` to `end` of a key; for none, they may be freed. row_bytes: the fetcher's.

    kind: of memory that the fetcher can read.
    """

    key: bytes
    first: int
    end: int
    row_bytes: int
    kind: Kind

    def pack(self) -> bytes:
        """As it is sent."""
        return _HELLO.pack(MAGIC, self.key, self.first, self.end, self.row_bytes, self.kind)

    @classmethod
    def receive(cls, line: Line) -> Self:
        """Raises: HandoffError."""
        magic, key, first, end, row_bytes, kind = _HELLO.unpack(line.take(_HELLO.size))
        if magic != MAGIC or first > end or kind not in set(Kind):
            raise HandoffError("the greeting is malformed")
        return cls(key, first, end, row_bytes, Kind(kind))


@dataclass(frozen=True, slots=True)
class Rows:
    """Announces `parts` parts of rows, from `part` on. slot: where they lie."""

    first: int
    count: int
    slot: int
    part: int = 0
    parts: int = 0

    def pack(self) -> bytes:
        """As it is sent."""
        return _ROWS.pack(self.first, self.count, self.slot, self.part, self.parts)

    @classmethod
    def receive(cls, line: Line) -> Self:
        """Raises: HandoffError; also with the reason that follows NOTHING."""
        rows = cls(*_ROWS.unpack(line.take(_ROWS.size)))
        if rows.first == NOTHING:
            receive_answer(line)
            raise HandoffError("the other server ended the hand-off")
        return rows


class Moved:
    """Which parts of the rows `first` to `end` have moved; each row gets its parts in order.

    Kept as runs of rows that have the same number of parts.
    """

    def __init__(self, first: int, end: int, parts: int) -> None:
        self.first, self.end, self._parts = first, end, parts
        self._runs = [(end, 0)]  # (end of the run, parts of each row)

    @property
    def whole(self) -> int:
        """Leading rows with all parts."""
        end, parts = self._runs[0]
        return end - self.first if parts == self._parts else 0

    @property
    def complete(self) -> bool:
        """All rows are whole."""
        return self.whole == self.end - self.first

    def next(self, tokens: int, planned: int, written: int, most: int, slot: int) -> Rows | None:
        """What may move now, for a slot of `most` whole rows; None if there is nothing.

        Rows below `tokens` have all parts; those of the step in progress, below `planned`, have `written`.
        """
        at = self.first
        for end, parts in self._runs:
            for until, ready in ((tokens, self._parts), (planned, written)):
                stop = min(end, until)
                if at < stop and parts < ready:
                    count = min(stop - at, most * self._parts // (ready - parts))
                    return Rows(at, count, slot, parts, ready - parts)
                at = max(at, stop)
            if at < end:
                return None
        return None

    def fits(self, rows: Rows, most: int) -> bool:
        """Whether these follow what has moved, and lie in a slot of `most` whole rows."""
        begin, end, at = rows.first, rows.first + rows.count, self.first
        if not (self.first <= begin < end <= self.end and 0 < rows.parts <= self._parts - rows.part):
            return False
        if rows.count * rows.parts > most * self._parts or rows.slot >= SLOTS:
            return False
        for stop, parts in self._runs:
            if at < end and stop > begin and parts != rows.part:
                return False
            at = stop
        return True

    def add(self, rows: Rows) -> None:
        """They have moved; they fit."""
        runs, at = list[tuple[int, int]](), self.first
        for end, parts in self._runs:
            for until, has in (
                (rows.first, parts),
                (rows.first + rows.count, parts + rows.parts),
                (end, parts),
            ):
                stop = min(until, end)
                if at < stop:
                    if runs and runs[-1][1] == has:
                        runs.pop()
                    runs.append((stop, has))
                    at = stop
        self._runs = runs


def answer(kind: Kind) -> bytes:
    """The rows may be fetched, through memory of this kind."""
    return _ANSWER.pack(kind, 0)


def refusal(reason: str) -> bytes:
    """They may not."""
    text = reason.encode()[:MAX_REASON]
    return _ANSWER.pack(REFUSED, len(text)) + text


def receive_answer(
    line: Line, check: Callable[[], None] | None = None, descriptors: list[int] | None = None
) -> Kind:
    """Waits for it. check: called at each sign of life before it. descriptors: as of Line.take_answer().

    Raises: HandoffError with the reason if the answer is a refusal; what check() raises.
    """

    def take() -> tuple[int, int]:
        data = line.take(_ANSWER.size) if descriptors is None else line.take_answer(descriptors)
        kind, length = _ANSWER.unpack(data)
        return kind, length

    kind, length = take()
    while kind == WAIT:
        if check is not None:
            check()
        kind, length = take()
    text = line.take(min(length, MAX_REASON)) if length else b""
    if kind not in set(Kind):
        reason = "".join(each if each.isprintable() else "?" for each in text.decode(errors="replace"))
        raise HandoffError(reason or "refused without a reason")
    return Kind(kind)


class Line:
    """A connected socket with one deadline for every wait: `seconds` without a byte end it.

    until: of time.monotonic(), ends all reading, though a byte may come now and then. received: when the last
    byte came.
    """

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        sock.settimeout(seconds)
        self.sock = sock
        self.until, self.received = math.inf, -math.inf
        self._closed = "the connection was closed"

    def take(self, size: int) -> bytes:
        """Exactly `size` bytes. Raises: HandoffError."""
        buffer = bytearray(size)
        self.fill(memoryview(buffer))
        return bytes(buffer)

    def take_answer(self, descriptors: list[int]) -> bytes:
        """The bytes of an Answer; a descriptor that was sent beside them is added, no more than one.

        Raises: HandoffError.
        """
        data = b""
        while len(data) < _ANSWER.size:
            self._check_time()
            try:
                part, found, _, _ = socket.recv_fds(self.sock, _ANSWER.size - len(data), 1)
            except OSError as error:
                raise _failure("reading failed", error) from error
            for descriptor in found:
                if descriptors:
                    os.close(descriptor)
                else:
                    descriptors.append(descriptor)
            if not part:
                raise HandoffError(self._closed)
            self.received = time.monotonic()
            data += part
        return data

    def fill(self, view: memoryview) -> None:
        """Fills a buffer. Raises: HandoffError."""
        while view:
            self._check_time()
            try:
                count = self.sock.recv_into(view)
            except OSError as error:
                raise _failure("reading failed", error) from error
            if not count:
                raise HandoffError(self._closed)
            self.received = time.monotonic()
            view = view[count:]

    def _check_time(self) -> None:
        if time.monotonic() > self.until:
            raise HandoffError("it took too long")

    def check_open(self) -> None:
        """Raises: HandoffError if the other end has closed it, or sent something."""
        try:
            if self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                return
        except BlockingIOError:
            return
        except OSError as error:
            raise HandoffError(f"reading failed: {error}") from error
        raise HandoffError("the connection was closed")

    def put(self, data: bytes | memoryview) -> None:
        """Sends all. Raises: HandoffError."""
        rest = memoryview(data)
        try:
            while rest:
                self.sock.sendall(rest[:PIECE_BYTES])
                rest = rest[PIECE_BYTES:]
        except OSError as error:
            raise _failure("writing failed", error) from error

    def end(self, why: str) -> None:
        """Ends every wait of another thread for this line, with this reason."""
        self._closed = why
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket."""
        self.sock.close()


def connect(address: str, local: str, seconds: float) -> tuple[Line, bool]:
    """A connection, and whether it is one of the same host. Raises: HandoffError.

    address: host:port. local: name of an abstract Unix socket, tried first; "" = none.
    """
    began = time.monotonic()
    if local:
        with suppress(OSError):  # another host
            return Line(_local_socket(local, seconds), seconds), True
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 1 <= int(port) <= LAST_PORT):
        raise HandoffError(f"its address is {address!r}, not host:port")
    left = max(0.1, seconds - (time.monotonic() - began))
    try:
        return Line(socket.create_connection((host.strip("[]"), int(port)), left), seconds), False
    except (OSError, ValueError) as error:  # ValueError: no host can have this name
        raise _failure("connecting failed", error) from error


def _local_socket(name: str, seconds: float) -> socket.socket:
    """Raises: OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(seconds)
        sock.connect("\0" + name)
    except OSError:
        sock.close()
        raise
    return sock


def _failure(what: str, error: Exception) -> HandoffError:
    silent = isinstance(error, TimeoutError) or (isinstance(error, OSError) and error.errno in UNREACHABLE)
    return (Silent if silent else HandoffError)(f"{what}: {error}")
