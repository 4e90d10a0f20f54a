"""Waits of the host for a GPU, each with a deadline: torch's own have none."""

from __future__ import annotations

import time
from concurrent.futures import Future
from threading import Thread
from typing import Protocol

import torch

from ep_server.errors import InternalError
from ep_server.exchange.spec import ExchangeSpec

IDLE_SECONDS = 30.0  # for kernels to end once nothing makes them wait
LOOK_SECONDS = 20e-6  # between two looks at the device, which has the next step already


class Event(Protocol):
    """A point of a stream, as torch.cuda.Event."""

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...


class Stream(Protocol):
    """Work of a GPU in its order, as torch.cuda.Stream."""

    def record_event(self) -> Event:
        """An event after all work enqueued so far."""
        ...


def longest_wait(spec: ExchangeSpec) -> float:
    """Seconds in which a GPU ends what it has to do, waits for lost ranks included."""
    return spec.timeout_ns / 1e9 + IDLE_SECONDS


def await_event(event: Event, seconds: float, what: str, look: float = LOOK_SECONDS) -> None:
    """Waits until the device has passed an event.

    Args:
        what: the work before it, named in the error. look: seconds between two checks.
    Raises: InternalError after so many seconds; RuntimeError of the GPU.
    """
    deadline = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > deadline:
            raise InternalError(f"the device has not ended {what} in {seconds:g} s")
        time.sleep(look)


def await_stream(stream: Stream, seconds: float, what: str, look: float = LOOK_SECONDS) -> None:
    """Waits for all work of a stream. Arguments and errors as in await_event()."""
    await_event(stream.record_event(), seconds, what, look)


def await_current(device: torch.device, seconds: float, what: str, look: float = LOOK_SECONDS) -> None:
    """Waits for all work of a GPU's current stream; returns at once on a CPU. Otherwise as await_event()."""
    if device.type == "cuda":
        await_stream(torch.cuda.current_stream(device), seconds, what, look)


def await_idle(device: torch.device, seconds: float = IDLE_SECONDS, used: object = None) -> None:
    """Returns once a GPU has ended all work of this process. In a thread: no event is behind all streams.

    used: what this work uses. It lives until the work has ended, also if that is long after this call.
    Raises: InternalError after so many seconds; RuntimeError of the GPU.
    """
    done: Future[None] = Future()

    def run(used: list[object]) -> None:
        error: BaseException | None = None
        try:
            torch.cuda.synchronize(device)
        except Exception as raised:
            error = raised
        used.clear()  # first: the caller is the last to drop it
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    Thread(target=run, args=([used],), name="gpu-idle", daemon=True).start()
    try:
        done.result(seconds)
    except TimeoutError:
        raise InternalError(f"{device} has not ended its work in {seconds:g} s") from None
