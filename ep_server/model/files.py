"""The values of stored tensors, out of memory-mapped files: what loads on the CPU.

On a GPU `gpu.staged_files` does it. Knows files and dtypes; knows nothing of names, scales or models.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open

from ep_server.errors import CheckpointError
from ep_server.model.checkpoint import StoredTensor

MOST_READERS = 16  # threads that read for a GPU: enough to keep its copy engine busy
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


def files_for(device: torch.device) -> AbstractContextManager[TensorFiles]:
    """What loads for a device."""
    if device.type != "cuda":
        return MappedFiles(device)
    from ep_server.model.gpu.staged_files import StagedFiles, StreamCopies

    return StagedFiles(StreamCopies(device))


class MappedFiles:
    """See TensorFiles. Only the pages of what is loaded are touched, and without `into` nothing is copied.

    Each shard is opened when the first tensor of it is loaded. A context: the mappings end with it.
    device: elsewhere than on the CPU everything is copied there, page by page.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._files = device, ExitStack()
        self._open: dict[Path, Any] = {}
        self._opening = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def load(
        self, stored: StoredTensor, part: int | None = None, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See TensorFiles; a view of the mapping where it is not copied."""
        try:
            opened = self._opened(stored.file)
            name = stored.name
            mapped: torch.Tensor = opened.get_tensor(name) if part is None else opened.get_slice(name)[part]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{stored.file}: tensor {stored.name}: cannot be read ({error})") from error
        return mapped.to(self._device) if into is None else into.copy_(mapped)

    def finish(self) -> None:
        """Nothing: they are there when load() returns."""

    def _opened(self, file: Path) -> Any:
        with self._opening:
            if file not in self._open:
                self._open[file] = self._files.enter_context(safe_open(file, framework="pt", device="cpu"))
        return self._open[file]
