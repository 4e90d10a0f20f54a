"""Reads tensors that a device goes on changing, without waiting for the steps that it was given."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ep_server.backends.gpu.waiting import await_stream

COPY_SECONDS = 60.0  # for some kilobytes that wait for no step: the device is lost then


class Snapshot:
    """Copies of counters on the host, over a stream of its own. One thread uses it.

    Kernels may be at work on them: each number is one that was there, two may be of different moments. Of
    steps that have been collected all is in it.

    Args:
        tensors: of one device; they stay where they are.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        cuda = tensors[0].is_cuda
        self._tensors = list(tensors)
        self._copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=cuda) for t in tensors]
        self._stream = torch.cuda.Stream(tensors[0].device) if cuda else None  # type: ignore[no-untyped-call]

    def take(self) -> list[torch.Tensor]:
        """The numbers of now, on the host; the next take() overwrites them. Waits for its own copies only.

        Raises: InternalError if they have not come after COPY_SECONDS.
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
