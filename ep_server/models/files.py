"""The values of stored tensors, out of memory-mapped files: what loads on the CPU.

On a GPU `gpu.staged_files` does it. Knows files and dtypes; knows nothing of names, scales or models.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ep_server.errors import CheckpointError
from ep_server.models.checkpoint import StoredTensor
from ep_server.models.shards import OpenShards, TensorFiles

MOST_READERS = 16  # threads that read for a GPU: enough to keep its copy engine busy


def files_for(device: torch.device) -> AbstractContextManager[TensorFiles]:
    """What loads for a device."""
    if device.type != "cuda":
        return MappedFiles(device)
    from ep_server.backends.gpu.staged_files import StagedFiles, StreamCopies

    return StagedFiles(StreamCopies(device))


class MappedFiles(OpenShards[Any]):
    """See TensorFiles. Only the pages of what is loaded are touched, and without `into` nothing is copied.

    A context: the mappings end with it.
    device: elsewhere than on the CPU everything is copied there, page by page.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def load(
        self, stored: StoredTensor, part: int | None = None, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See TensorFiles; a view of the mapping where it is not copied."""
        try:
            opened = self.shard(stored.file)
            name = stored.name
            mapped: torch.Tensor = opened.get_tensor(name) if part is None else opened.get_slice(name)[part]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{stored.file}: tensor {stored.name}: cannot be read ({error})") from error
        return mapped.to(self._device) if into is None else into.copy_(mapped)

    def finish(self) -> None:
        """Nothing: they are there when load() returns."""

    def open_shard(self, file: Path, closing: ExitStack) -> Any:
        """Maps it."""
        return closing.enter_context(safe_open(file, framework="pt", device="cpu"))
