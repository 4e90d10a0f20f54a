"""Copies of counters that the GPU updates, and how long the host waits for a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ep_server.exchange.device_wait import await_event, await_stream

STEP_SECONDS = 60.0  # until a step must have ended, beyond the deadline of a wait for peers: only one expires


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
