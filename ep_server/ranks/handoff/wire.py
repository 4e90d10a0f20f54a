"""What two ranks of different servers say to each other while KV rows move. Both ends check every length.

    fetcher -> holder   Hello: which rows of which key, in what format
    holder -> fetcher   Answer: OK or why not; over a local socket with the descriptor of shared memory
    holder -> fetcher   Rows: `count` rows from `first` on; their bytes follow, or lie in slot `slot` of the
                        shared memory. count 0: still computing. first NOTHING: it ended, an Answer follows
    fetcher -> holder   one byte per Rows with rows: the slot may be used again; DONE after the last

Numbers are little-endian. Units: tokens (a row each), bytes, seconds.
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass
from typing import Any, Self

import torch

from ep_server.errors import Unavailable

MAGIC = 0x31564B45  # "EKV1"
KEY_BYTES = 16
NOTHING = 0xFFFFFFFF
TAKEN, DONE = b"t", b"d"
MAX_REASON = 256
SLOTS = 2  # of the shared memory: one is filled while the other is read
SLOT_BYTES = 8 << 20  # about as long as a step's worth of rows; short enough to wait for

_HELLO = struct.Struct(f"<I{KEY_BYTES}sIIIB")
_ANSWER = struct.Struct("<BH")
_ROWS = struct.Struct("<III")


class HandoffError(Unavailable):
    """The other end is gone, refuses, or sent what it must not."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Asks for the rows `first` to `end` of a key; for none, they may be freed. row_bytes: the fetcher's.

    shared: offer memory.
    """

    key: bytes
    first: int
    end: int
    row_bytes: int
    shared: bool

    def pack(self) -> bytes:
        """As it is sent."""
        return _HELLO.pack(MAGIC, self.key, self.first, self.end, self.row_bytes, self.shared)

    @classmethod
    def receive(cls, line: Line) -> Self:
        """Raises: HandoffError."""
        magic, key, first, end, row_bytes, shared = _HELLO.unpack(line.take(_HELLO.size))
        if magic != MAGIC or first > end:
            raise HandoffError("the greeting is malformed")
        return cls(key, first, end, row_bytes, bool(shared))


@dataclass(frozen=True, slots=True)
class Rows:
    """Announces rows. slot: of the shared memory."""

    first: int
    count: int
    slot: int

    def pack(self) -> bytes:
        """As it is sent."""
        return _ROWS.pack(self.first, self.count, self.slot)

    @classmethod
    def receive(cls, line: Line) -> Self:
        """Raises: HandoffError; also with the reason that follows NOTHING."""
        rows = cls(*_ROWS.unpack(line.take(_ROWS.size)))
        if rows.first == NOTHING:
            receive_answer(line)
            raise HandoffError("the other server ended the hand-off")
        return rows


def slot_rows(row_bytes: int, rows: int) -> int:
    """Rows of a slot, as both sides compute them. rows: of the whole hand-off."""
    return max(1, min(SLOT_BYTES // row_bytes, rows))


def bytes_of(rows: torch.Tensor) -> memoryview:
    """The memory of contiguous rows, for a socket."""
    flat: Any = rows.view(-1).numpy()
    return memoryview(flat)


def answer(reason: str = "") -> bytes:
    """OK, or why not."""
    text = reason.encode()[:MAX_REASON]
    return _ANSWER.pack(not text, len(text)) + text


def receive_answer(line: Line) -> None:
    """Raises: HandoffError with the reason if the answer is not OK."""
    fine, length = _ANSWER.unpack(line.take(_ANSWER.size))
    text = line.take(min(length, MAX_REASON)) if length else b""
    if not fine:
        raise HandoffError(bytes(text).decode(errors="replace") or "refused without a reason")


class Line:
    """A connected socket with one deadline for every wait: `seconds` without a byte end it."""

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        sock.settimeout(seconds)
        self.sock = sock

    def take(self, size: int) -> bytes:
        """Exactly `size` bytes. Raises: HandoffError."""
        buffer = bytearray(size)
        self.fill(memoryview(buffer))
        return bytes(buffer)

    def fill(self, view: memoryview) -> None:
        """Fills a buffer. Raises: HandoffError."""
        while view:
            try:
                count = self.sock.recv_into(view)
            except OSError as error:
                raise HandoffError(f"reading failed: {error}") from error
            if not count:
                raise HandoffError("the connection was closed")
            view = view[count:]

    def put(self, data: bytes | memoryview) -> None:
        """Sends all. Raises: HandoffError."""
        try:
            self.sock.sendall(data)
        except OSError as error:
            raise HandoffError(f"writing failed: {error}") from error

    def close(self) -> None:
        """Closes the socket."""
        self.sock.close()


def connect(address: str, local: str, seconds: float) -> tuple[Line, bool]:
    """A connection, and whether it is one of the same host. Raises: HandoffError.

    address: host:port. local: name of an abstract Unix socket, tried first; "" = none.
    """
    began = time.monotonic()
    if local:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(seconds)
            sock.connect("\0" + local)
            return Line(sock, seconds), True
        except OSError:  # another host
            sock.close()
    host, _, port = address.rpartition(":")
    left = max(0.1, seconds - (time.monotonic() - began))
    try:
        return Line(socket.create_connection((host.strip("[]"), int(port)), left), seconds), False
    except (OSError, ValueError) as error:
        raise HandoffError(f"{address} does not answer: {error}") from error
