"""Waits for all work of a GPU, with a deadline."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Thread

import torch

from ep_server.errors import InternalError

IDLE_SECONDS = 30.0  # for kernels to end once nothing makes them wait


def await_idle(device: torch.device, seconds: float = IDLE_SECONDS) -> None:
    """Returns once a GPU has ended all work of this process.

    In a thread, since torch's call has no deadline. Raises: InternalError after so many seconds; RuntimeError
    of the GPU.
    """
    done: Future[None] = Future()

    def wait() -> None:
        try:
            torch.cuda.synchronize(device)
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    Thread(target=wait, name="gpu-idle", daemon=True).start()
    try:
        done.result(seconds)
    except TimeoutError:
        raise InternalError(f"{device} has not ended its work in {seconds:g} s") from None
