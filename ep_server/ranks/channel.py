"""Carries frames over one stream socket: the frontend's asyncio end and a rank's blocking end.

A frame is a 4-byte little-endian length and that many bytes. Frames stay in order in both directions. End of
file means that the other process has exited. Units: bytes, seconds.

A probe is a length that no frame has, followed by a frame count. A rank sends one when it starts to wait: it
has handled that many frames and has nothing left to do. The frontend then probes the rank until it sends the
next frame or the rank reports that it is busy, and closes the channel if the rank does not answer in time. A
busy rank is not probed: its peers' deadlines cover it. A process stopped by a signal is lost either way.
"""

from __future__ import annotations

import asyncio
import fcntl
import select
import socket
import struct
import termios
import time
from collections.abc import Callable
from typing import cast

from ep_server.errors import Unavailable

MAX_FRAME = 256 << 20
_HEADER = struct.Struct("<I")
_CHUNK = 1 << 18
_PROBE = struct.Struct("<II")
_BUSY = 0xFFFFFFFF  # in place of a count
_PROBE_LENGTH = int.from_bytes(b"prob", "little")  # more than MAX_FRAME
TICKS = 5  # of the time that a rank has for its answer: a probe at each


class ChannelClosed(Unavailable):
    """The other end has exited, sent a malformed frame, or stopped reading for too long."""


def frame(payload: bytes) -> bytes:
    """One payload as it is sent over the socket."""
    if len(payload) > MAX_FRAME:
        raise ChannelClosed(f"a frame of {len(payload)} bytes, more than {MAX_FRAME}")
    return _HEADER.pack(len(payload)) + payload


def probe(frames: int) -> bytes:
    """A probe as it is sent. frames: how many the sender counts so far."""
    return _PROBE.pack(_PROBE_LENGTH, frames % 2**32)


class FrameReader:
    """Cuts a byte stream into frames; a frame may arrive in any pieces.

    frames: how many so far. probe: the count of the last probe, None once handled.
    """

    def __init__(self) -> None:
        self.frames = 0
        self.probe: int | None = None
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Takes the next bytes; returns the payloads they complete. Raises ChannelClosed on a bad length."""
        buffer = self._buffer
        buffer += data
        frames = []
        start = 0
        while len(buffer) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(buffer, start)
            if length == _PROBE_LENGTH:
                if len(buffer) - start < _PROBE.size:
                    break
                _, self.probe = _PROBE.unpack_from(buffer, start)
                start += _PROBE.size
                continue
            if length > MAX_FRAME:
                raise ChannelClosed(f"a frame of {length} bytes, more than {MAX_FRAME}")
            end = start + _HEADER.size + length
            if end > len(buffer):
                break
            frames.append(bytes(buffer[start + _HEADER.size : end]))
            self.frames += 1
            start = end
        del buffer[:start]
        return frames


class RankChannel:
    """A rank's end. One thread uses it. Only wait() blocks, and send() while the frontend does not read.

    send_seconds: how long the outbox may stay full before the frontend is considered dead.
    """

    def __init__(
        self, sock: socket.socket, *, max_outbox: int = 64 << 20, send_seconds: float = 30.0
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reader = FrameReader()
        self._outbox = bytearray()
        self._max_outbox = max_outbox
        self._send_seconds = send_seconds

    def send(self, payload: bytes) -> None:
        """Sends a frame, or queues it until the socket accepts it. Raises ChannelClosed."""
        self._outbox += frame(payload)
        self._flush()
        if len(self._outbox) > self._max_outbox:
            self.drain(self._send_seconds)

    def poll(self) -> list[bytes]:
        """The payloads that have arrived; does not block. Raises ChannelClosed at end of file."""
        self._flush()
        payloads: list[bytes] = []
        while True:
            try:
                data = self._sock.recv(_CHUNK)
            except BlockingIOError:
                return payloads
            except ConnectionError as error:
                raise ChannelClosed("the frontend process has exited") from error
            if not data:
                raise ChannelClosed("the frontend process has exited")
            payloads += self._reader.feed(data)
            if len(data) < _CHUNK:
                return payloads

    def wait(self, seconds: float | None = None) -> list[bytes]:
        """Sleeps until at least one payload has arrived, no longer than `seconds`; answers probes meanwhile.

        Raises: ChannelClosed.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        handled, reported = self._reader.frames, False
        while not (payloads := self.poll()):
            if not reported or self._reader.probe is not None:
                self._send_probe(handled)
                reported = True
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            self._select(left)
        if self._reader.probe == handled % 2**32:  # it preceded these frames, which are work now
            self._send_probe(handled)
        return payloads

    def report(self, *, waiting: bool) -> None:
        """Reports that this rank is about to wait, or that it has work again."""
        self._send_probe(self._reader.frames if waiting else _BUSY)

    def _send_probe(self, handled: int) -> None:
        self._reader.probe = None
        self._outbox += probe(handled)
        self._flush()

    def drain(self, timeout: float) -> None:
        """Returns once everything sent has left. Raises ChannelClosed after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._outbox:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ChannelClosed(f"the frontend process has not read for {timeout:g} s")
            self._select(left, read=False)
            self._flush()

    def close(self) -> None:
        """Closes the socket; unsent frames are lost."""
        self._sock.close()

    def _flush(self) -> None:
        while self._outbox:
            try:
                sent = self._sock.send(self._outbox)
            except BlockingIOError:
                return
            except ConnectionError as error:
                raise ChannelClosed("the frontend process has exited") from error
            del self._outbox[:sent]

    def _select(self, timeout: float | None, *, read: bool = True) -> None:
        poller = select.poll()
        poller.register(self._sock, (select.POLLIN if read else 0) | (select.POLLOUT if self._outbox else 0))
        poller.poll(None if timeout is None else timeout * 1000)


class FrontChannel(asyncio.Protocol):
    """The frontend's end: calls on_frame(payload) in the event loop, on_closed(reason) once."""

    def __init__(self, on_frame: Callable[[bytes], None], on_closed: Callable[[str], None]) -> None:
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._sent = 0  # frames
        self._had = -1  # frames the rank had handled when it last reported waiting
        self._silent: int | None = None  # ticks since an unanswered probe, None = no probe is open
        self._next_tick: asyncio.TimerHandle | None = None

    @classmethod
    async def connect(
        cls, sock: socket.socket, on_frame: Callable[[bytes], None], on_closed: Callable[[str], None]
    ) -> FrontChannel:
        """Takes over a connected socket."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(on_frame, on_closed), sock=sock)
        return channel

    def watch(self, seconds: float, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Probes the rank while it waits for frames; closes the channel after `seconds` without an answer.

        is_stopped: whether a signal has stopped its process. That is limited to `seconds` even for a busy
            rank.
        """
        loop = asyncio.get_running_loop()
        stopped = 0  # ticks

        def tick() -> None:
            # Counts ticks, not time: a frontend that was itself stopped or busy must not blame the rank.
            nonlocal stopped
            stopped = stopped + 1 if is_stopped() else 0
            if self._silent is not None:
                self._silent += 1
            elif self._had == self._sent % 2**32 and self._transport is not None:
                self._silent = 0
                self._transport.write(probe(self._sent))
            if self._silent == TICKS + 1:  # one more: a peer waiting in the vote names the culprit better
                self._end(f"did not answer for {seconds:g} s while it had nothing to do")
            elif stopped == TICKS + 2:  # peers first, here too
                self._end(f"was stopped by a signal for more than {seconds:g} s")
            else:
                self._next_tick = loop.call_later(seconds / TICKS, tick)

        tick()

    @property
    def buffered(self) -> int:
        """Bytes sent that the rank's socket has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def send(self, payload: bytes) -> None:
        """Sends a frame without blocking; does nothing on a closed channel, which on_closed has reported."""
        if self._transport is not None and not self._transport.is_closing():
            self._sent += 1
            self._transport.write(frame(payload))

    def finish(self) -> bool:
        """The rank writes no more. Ends the channel, and returns True, if all it wrote has been read."""
        if self._transport is None or self._transport.is_closing():
            return True
        sock = self._transport.get_extra_info("socket")
        if any(fcntl.ioctl(sock.fileno(), termios.FIONREAD, bytes(4))):
            return False
        self._end("closed its channel")
        return True

    def close(self) -> None:
        """Closes the socket; on_closed is not called."""
        self._on_closed = lambda reason: None
        if self._next_tick is not None:
            self._next_tick.cancel()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        try:
            payloads = self._reader.feed(data)
        except ChannelClosed as error:
            self._end(f"sent {error}")
            return
        if self._reader.probe is not None:
            self._had, self._silent = self._reader.probe, None
            self._reader.probe = None
        for payload in payloads:
            self._on_frame(payload)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._end("closed its channel")

    def _end(self, reason: str) -> None:
        on_closed = self._on_closed
        self.close()
        on_closed(reason)
