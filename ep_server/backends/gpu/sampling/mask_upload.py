"""[9] Masks of grammars on their way to the device, beside the step that runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


class MaskUpload:
    """Host and device memory for the masks of a step. One thread uses it.

    Args:
        rows: most masks of a step. words: of a mask. staging: host buffers used in turn.
    """

    def __init__(self, rows: int, words: int, device: torch.device, staging: int) -> None:
        cuda = device.type == "cuda"
        self._host = [torch.zeros(rows, words, dtype=torch.int32, pin_memory=cuda) for _ in range(staging)]
        self._device = torch.zeros(rows, words, dtype=torch.int32, device=device) if cuda else None
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._read: Any = None  # the event behind which the device's copy may be overwritten
        self._uploads = 0

    def write(self, masks: Sequence[np.ndarray | None], slots: torch.Tensor, table: torch.Tensor) -> None:
        """Enqueues masks into rows of a table. The copy to the device waits for no step.

        Args:
            masks: [W] int32 each; None = all ones. slots: [N] int32, their rows of `table`, [S, W] int32.
        """
        host = self._host[self._uploads % len(self._host)][: len(masks)]
        self._uploads += 1
        for row, mask in zip(host.numpy(), masks, strict=True):
            row[:] = -1 if mask is None else mask
        given = host if self._device is None else self._copied(host)
        table.index_copy_(0, slots.long(), given)
        if self._stream is not None:
            self._read = torch.cuda.current_stream().record_event()

    def _copied(self, host: torch.Tensor) -> torch.Tensor:
        """The copy on the device; the current stream waits for it."""
        assert self._device is not None and self._stream is not None
        given = self._device[: len(host)]
        with torch.cuda.stream(self._stream):
            if self._read is not None:
                self._stream.wait_event(self._read)
            given.copy_(host, non_blocking=True)
            arrived = self._stream.record_event()
        torch.cuda.current_stream().wait_event(arrived)
        return given
