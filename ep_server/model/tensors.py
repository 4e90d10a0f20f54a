"""Reads single tensors out of memory-mapped safetensors files, FP8 block-scaled ones widened or as codes.

Knows files, dtypes and scales; knows nothing of models.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from ep_server.errors import CheckpointError
from ep_server.model.checkpoint import Checkpoint
from ep_server.model.fp8 import Codes, widen

_FP8 = "F8_E4M3"


class TensorSource(Protocol):
    """Where weights come from: the files of a checkpoint, or `dummy.DummyReader`."""

    def has(self, name: str) -> bool:
        """There is a tensor of that name."""
        ...

    def read(self, name: str, shape: tuple[int, ...], part: int | None = None) -> torch.Tensor:
        """One floating-point tensor, or entry `part` of its first dimension; all are on one device."""
        ...

    def is_fp8(self, name: str) -> bool:
        """There is a tensor of that name and it is FP8: read_codes() may be called."""
        ...

    def read_codes(self, name: str, shape: tuple[int, ...], part: int | None = None) -> Codes:
        """A matrix whose widened values are read()'s, or entry `part` of a stack of them."""
        ...

    def read_vector(self, name: str, lengths: tuple[int, ...]) -> torch.Tensor | None:
        """float32 [n] of a tensor that has n elements, one of `lengths`; None where there is none."""
        ...


class TensorReader:
    """Opens each shard once, when the first tensor of it is read. Several threads may read at once.

    Args:
        block: rows and columns that share one FP8 scale, None where the checkpoint is not quantised.
        files: closes the shards.
    """

    def __init__(self, checkpoint: Checkpoint, block: tuple[int, int] | None, files: ExitStack) -> None:
        self._checkpoint, self._block, self._files = checkpoint, block, files
        self._open: dict[Path, Any] = {}
        self._opening = threading.Lock()

    def has(self, name: str) -> bool:
        """The checkpoint holds a tensor of that name."""
        return name in self._checkpoint.tensors

    def read(self, name: str, shape: tuple[int, ...], part: int | None = None) -> torch.Tensor:
        """One tensor, or entry `part` of its first dimension, in the dtype of the file; FP8 as float32.

        The result may be a view of the mapping: copy it before the reader closes.
        Raises: CheckpointError if it is missing, of another shape or dtype, or cannot be read.
        """
        stored = self._checkpoint.find(name, shape)
        if stored.dtype == _FP8:
            codes = self.read_codes(name, shape, part)
            assert self._block is not None
            return widen(*codes, self._block)
        values = self._load(name, part)
        if not values.is_floating_point() or values.element_size() == 1:
            raise CheckpointError(
                f"{stored.file}: tensor {name}: dtype {stored.dtype}, expected F32, BF16, F16 or F8_E4M3"
            )
        return values

    def is_fp8(self, name: str) -> bool:
        """See TensorSource."""
        return self.has(name) and self._checkpoint.tensors[name].dtype == _FP8

    def read_codes(self, name: str, shape: tuple[int, ...], part: int | None = None) -> Codes:
        """See TensorSource; the codes may be a view of the mapping.

        Raises: as read(); CheckpointError if it is not FP8, or its scales do not fit quantization_config.
        """
        stored = self._checkpoint.find(name, shape)
        if stored.dtype != _FP8:
            raise CheckpointError(
                f"{stored.file}: tensor {name}: dtype {stored.dtype}, expected {_FP8} like other experts"
            )
        if self._block is None:
            raise CheckpointError(
                f"{self._checkpoint.path}: {name} is FP8 but config.json has no quantization_config"
            )
        rows, columns = self._block
        grid = (-(-shape[-2] // rows), -(-shape[-1] // columns))
        scale_name = f"{name}_scale_inv"
        self._checkpoint.find(scale_name, (*shape[:-2], *grid))
        return Codes(self._load(name, part), self._load(scale_name, part).float())

    def read_vector(self, name: str, lengths: tuple[int, ...]) -> torch.Tensor | None:
        """See TensorSource. Raises: CheckpointError for another number of elements or dtype."""
        stored = self._checkpoint.tensors.get(name)
        if stored is None:
            return None
        if stored.size not in lengths:
            sizes = " or ".join(map(str, lengths))
            raise CheckpointError(
                f"{stored.file}: tensor {name}: expected {sizes} elements, found shape {list(stored.shape)}"
            )
        return self.read(name, stored.shape).flatten().float()

    def _load(self, name: str, part: int | None) -> torch.Tensor:
        file = self._checkpoint.tensors[name].file
        try:
            with self._opening:
                if file not in self._open:
                    stream = safe_open(file, framework="pt", device="cpu")
                    self._open[file] = self._files.enter_context(stream)
            opened = self._open[file]
            tensor: torch.Tensor = opened.get_tensor(name) if part is None else opened.get_slice(name)[part]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: tensor {name}: cannot be read ({error})") from error
        return tensor
