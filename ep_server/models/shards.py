"""The files of a checkpoint while it is loaded, as any way of loading has them.

Knows dtypes; knows nothing of devices, names or models.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import torch

from ep_server.models.checkpoint import StoredTensor

TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
Opened = TypeVar("Opened")


class TensorFiles(Protocol):
    """The shards of a checkpoint. Several threads may load at once."""

    def load(
        self, stored: StoredTensor, part: int | None = None, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The values of a tensor, or of entry `part` of its first dimension.

        Args:
            into: where they are to be: contiguous, of their dtype and shape; None = the files choose.
        Returns: `into`, or a tensor on the files' device, which may end with the files. Work of the device's
            current stream finds the values there.
        Raises: CheckpointError naming file and tensor if they cannot be read.
        """
        ...

    def finish(self) -> None:
        """Returns when all values are where they belong."""
        ...


class OpenShards(Generic[Opened]):
    """Each shard is opened when the first tensor of it is loaded, once for all threads.

    A context: they are closed behind it.
    """

    def __init__(self) -> None:
        self._closing = ExitStack()
        self._open: dict[Path, Opened] = {}
        self._opening = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    def shard(self, file: Path) -> Opened:
        """An open shard. Raises: what open_shard() raises."""
        with self._opening:
            if file not in self._open:
                self._open[file] = self.open_shard(file, self._closing)
            return self._open[file]

    @abstractmethod
    def open_shard(self, file: Path, closing: ExitStack) -> Opened:
        """Opens one. closing: gets what closes it."""
