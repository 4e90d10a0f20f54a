"""Waits of the host for a GPU, each with a deadline, and snapshots of counters that the GPU updates."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch

from ep_server.errors import InternalError

STEP_SECONDS = 60.0  # until a step must have ended, beyond the deadline of a wait for peers: only one expires
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


def await_event(event: Event, seconds: float, what: str = "a step", look: float = LOOK_SECONDS) -> None:
    """Waits until the device has passed an event.

    Args:
        what: the work before it, named in the error. look: seconds between two checks.
    Raises: InternalError after so many seconds.
    """
    deadline = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > deadline:
            raise InternalError(f"the device has not ended {what} in {seconds:g} s")
        time.sleep(look)


def await_stream(stream: Stream, seconds: float, what: str = "a step") -> None:
    """Waits for all work of a stream. Arguments and errors as in await_event()."""
    await_event(stream.record_event(), seconds, what)


def await_device(device: torch.device, seconds: float, what: str = "a step") -> None:
    """Waits for all work of a GPU's current stream; returns at once on a CPU. Raises: as await_event()."""
    if device.type == "cuda":
        await_stream(torch.cuda.current_stream(device), seconds, what)


class Reading:
    """A copy of counters on its way to the host, behind the work that the current stream has so far."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._copy.copy_(tensor, non_blocking=True)
        device = tensor.device
        self._arrived = torch.cuda.current_stream(device).record_event() if tensor.is_cuda else None

    def result(self, seconds: float) -> torch.Tensor:
        """On the host. Raises: InternalError if it has not arrived after so many seconds."""
        if self._arrived is not None:
            await_event(self._arrived, seconds, "copies of counters")
        return self._copy


COPY_SECONDS = 60.0  # for some kilobytes that wait for no step: the device is lost then


class Snapshot:
    """Copies counters to the host on its own stream. One thread uses it.

    Kernels may update counters meanwhile. Two copied numbers may stem from different moments.
    All counts of collected steps are included.

    Args:
        tensors: of one device; they stay where they are.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        cuda = tensors[0].is_cuda
        self._tensors = list(tensors)
        self._copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=cuda) for t in tensors]
        self._stream = torch.cuda.Stream(tensors[0].device) if cuda else None  # type: ignore[no-untyped-call]

    def take(self) -> list[torch.Tensor]:
        """The current numbers, on the host. The next take() overwrites them. Waits for its own copies only.

        Raises: InternalError if they have not arrived after COPY_SECONDS.
        """
        if self._stream is None:
            for copy, tensor in zip(self._copies, self._tensors, strict=True):
                copy.copy_(tensor)
            return self._copies
        with torch.cuda.stream(self._stream):
            for copy, tensor in zip(self._copies, self._tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
        await_stream(self._stream, COPY_SECONDS, "copies of counters")
        return self._copies
