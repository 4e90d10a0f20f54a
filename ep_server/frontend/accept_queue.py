"""Measures how long calls wait until this process accepts them.

gRPC queues calls by method, first in, first out, and does not report when a call arrived. A thread sends a
probe to the same queue every PERIOD. A call that is accepted before a probe arrived before that probe was
sent. Probes use a Unix socket that only this user can open, so they need no TLS and no token.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
from grpc import aio

log = logging.getLogger(__name__)

PERIOD = 0.1  # seconds between two probes: waits are known this exactly
MAX_PROBES = 64  # that wait at once; the oldest one counts
_KEY = "epserver-probe"
_ARRIVED: ContextVar[float] = ContextVar("arrived")  # of the call that a task handles, monotonic seconds


def seconds_since_arrival() -> float:
    """Of the call that the current task handles; its time in the accept queue included where it is known."""
    return time.monotonic() - _ARRIVED.get()


def message_arrived() -> None:
    """Another message of a call arrived now: seconds_since_arrival() counts from here in the current task."""
    _ARRIVED.set(time.monotonic())


class AcceptQueue(aio.ServerInterceptor):  # type: ignore[type-arg, misc, unused-ignore]
    """Notes when each call arrived. Add it first, and call listen() before the server starts."""

    def __init__(self, method: str = "", on_wait: Callable[[float], None] = lambda seconds: None) -> None:
        """method: "/service/method" whose queue is measured, "" = none. on_wait: gets each probe's wait."""
        self._method = method
        self._on_wait = on_wait
        self._secret = secrets.token_hex(16)
        self._sent: dict[str, float] = {}  # probes that are not accepted yet, oldest first
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._cleanup = ExitStack()
        self.path = ""  # of the socket of the probes, if there is one

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Answers probes; notes the arrival of other calls."""
        measured = handler_call_details.method == self._method
        probe = dict(handler_call_details.invocation_metadata or ()).get(_KEY, "") if measured else ""
        if probe and probe.startswith(self._secret):
            waited = self._taken(probe)
            if waited is not None:
                self._on_wait(waited)
            return grpc.stream_unary_rpc_method_handler(_answer)
        _ARRIVED.set(self._latest_arrival() if measured else time.monotonic())
        return await continuation(handler_call_details)

    def listen(self, server: aio.Server) -> None:
        """Adds the socket of the probes."""
        if not self._method:
            return
        try:
            directory = self._cleanup.enter_context(TemporaryDirectory(prefix="ep-server-"))
            path = str(Path(directory) / "probes")
            server.add_insecure_port(f"unix:{path}")
            self.path = path
        except (OSError, RuntimeError) as error:
            log.warning("cannot measure how long calls wait to be accepted: %s", error)

    def start(self) -> None:
        """Probes from now on. The server has started."""
        if self.path:
            self._thread = threading.Thread(target=self._send, name="accept-probes", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the probes, in at most PERIOD. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._cleanup.close()

    def _send(self) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(f"unix:{self.path}", options=options) as channel:
            call = channel.unary_unary(self._method, bytes, bytes)
            for number in itertools.count():
                if self._stop.wait(PERIOD):
                    return
                probe = f"{self._secret}-{number}"
                with self._lock:
                    if len(self._sent) >= MAX_PROBES:
                        continue
                    self._sent[probe] = time.monotonic()
                self._follow(call.future(b"", metadata=((_KEY, probe),)), probe)

    def _follow(self, call: Any, probe: str) -> None:
        """A probe that ends in any other way than by being accepted waits no more."""
        call.add_done_callback(lambda _: self._taken(probe))

    def _taken(self, probe: str) -> float | None:
        """The time that a probe has waited; None if it waits no more."""
        with self._lock:
            sent = self._sent.pop(probe, None)
        return None if sent is None else time.monotonic() - sent

    def _latest_arrival(self) -> float:
        with self._lock:
            return next(iter(self._sent.values()), time.monotonic())


async def _answer(_messages: Any, _context: Any) -> bytes:
    return b""
