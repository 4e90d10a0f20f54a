"""Waits for work of a GPU, each with a deadline."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread

import torch

from ep_server.errors import InternalError

IDLE_SECONDS = 30.0  # for kernels to end once nothing makes them wait


def await_idle(device: torch.device, seconds: float = IDLE_SECONDS, used: object = None) -> None:
    """Returns once a GPU has ended all work of this process.

    used: what this work uses. It lives until the work has ended, also if that is long after this call.
    Raises: InternalError after so many seconds; RuntimeError of the GPU.
    """
    _await(lambda: torch.cuda.synchronize(device), device, seconds, used)


def await_stream(stream: torch.cuda.Stream, device: torch.device, seconds: float = IDLE_SECONDS) -> None:
    """Returns once a stream of a GPU has ended its work. Raises: as await_idle()."""
    _await(stream.synchronize, device, seconds, None)


def _await(wait: Callable[[], None], device: torch.device, seconds: float, used: object) -> None:
    """In a thread, since calls of torch have no deadline."""
    done: Future[None] = Future()

    def run(used: list[object]) -> None:
        error: BaseException | None = None
        try:
            wait()
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
