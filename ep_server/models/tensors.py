"""Single tensors of a checkpoint by name, FP8 block-scaled ones widened or as codes.

Knows names, dtypes and scales; knows nothing of models, nor of how bytes leave files.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ep_server.errors import CheckpointError
from ep_server.models.checkpoint import Checkpoint, StoredTensor
from ep_server.models.fp8 import Codes, widen
from ep_server.models.shards import TORCH, TensorFiles

_FP8 = "F8_E4M3"
_FLOATS = ("F32", "BF16", "F16", "F64")


class TensorSource(Protocol):
    """Where weights come from: the files of a checkpoint, or `dummy.DummyReader`."""

    def has(self, name: str) -> bool:
        """There is a tensor of that name."""
        ...

    def read(self, name: str, shape: tuple[int, ...], part: int | None = None) -> torch.Tensor:
        """One floating-point tensor, or entry `part` of its first dimension; all are on one device."""
        ...

    def copy(self, into: torch.Tensor, name: str, shape: tuple[int, ...], part: int | None = None) -> None:
        """read()'s values into contiguous memory on the device, of any dtype."""
        ...

    def is_fp8(self, name: str) -> bool:
        """There is a tensor of that name and it is FP8: copy_codes() may be called."""
        ...

    def copy_codes(self, into: Codes, name: str, shape: tuple[int, ...], part: int | None = None) -> None:
        """A matrix whose widened values are read()'s, or entry `part` of a stack of them, as copy() does."""
        ...

    def read_vector(self, name: str, lengths: tuple[int, ...]) -> torch.Tensor | None:
        """float32 [n] of a tensor that has n elements, one of `lengths`; None where there is none."""
        ...


class TensorReader:
    """See TensorSource. Several threads may read at once.

    Args:
        block: rows and columns that share one FP8 scale, None where the checkpoint is not quantised.
        files: of the checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint, block: tuple[int, int] | None, files: TensorFiles) -> None:
        self._checkpoint, self._block, self._files = checkpoint, block, files

    def has(self, name: str) -> bool:
        """The checkpoint holds a tensor of that name."""
        return name in self._checkpoint.tensors

    def read(self, name: str, shape: tuple[int, ...], part: int | None = None) -> torch.Tensor:
        """One tensor, or entry `part` of its first dimension, in the dtype of the file; FP8 as float32.

        The result may end with the files: copy it.
        Raises: CheckpointError if it is missing, of another shape or dtype, or cannot be read.
        """
        stored = self._floats(name, shape)
        if stored.dtype != _FP8:
            return self._files.load(stored, part)
        codes, scale = (self._files.load(one, part) for one in self._coded(name, shape))
        assert self._block is not None
        return widen(codes, scale.float(), self._block)

    def copy(self, into: torch.Tensor, name: str, shape: tuple[int, ...], part: int | None = None) -> None:
        """See TensorSource. Raises: as read()."""
        stored = self._floats(name, shape)
        if stored.dtype == _FP8:
            into.copy_(self.read(name, shape, part))
        else:
            self._fill(into, stored, part)

    def is_fp8(self, name: str) -> bool:
        """See TensorSource."""
        return self.has(name) and self._checkpoint.tensors[name].dtype == _FP8

    def copy_codes(self, into: Codes, name: str, shape: tuple[int, ...], part: int | None = None) -> None:
        """See TensorSource.

        Raises: as read(); CheckpointError if it is not FP8, or its scales do not fit quantization_config.
        """
        for memory, stored in zip(into, self._coded(name, shape), strict=True):
            self._fill(memory, stored, part)

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

    def _fill(self, into: torch.Tensor, stored: StoredTensor, part: int | None) -> None:
        """What is stored in the dtype that is wanted goes straight there; the device converts the rest."""
        if TORCH[stored.dtype] is into.dtype:
            self._files.load(stored, part, into)
        else:
            into.copy_(self._files.load(stored, part))

    def _floats(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        stored = self._checkpoint.find(name, shape)
        if stored.dtype not in (*_FLOATS, _FP8):
            raise _wrong_dtype(stored, f"{', '.join(_FLOATS)} or {_FP8}")
        return stored

    def _coded(self, name: str, shape: tuple[int, ...]) -> tuple[StoredTensor, StoredTensor]:
        """A matrix of codes and its scales."""
        stored = self._checkpoint.find(name, shape)
        if stored.dtype != _FP8:
            raise _wrong_dtype(stored, f"{_FP8} like other experts")
        if len(shape) < 2:  # scales are of blocks of rows and columns
            raise _wrong_dtype(stored, f"{', '.join(_FLOATS)} for a tensor that is not a matrix")
        if self._block is None:
            raise CheckpointError(
                f"{self._checkpoint.path}: {name} is FP8 but config.json has no quantization_config"
            )
        rows, columns = self._block
        grid = (-(-shape[-2] // rows), -(-shape[-1] // columns))
        scale = self._checkpoint.find(f"{name}_scale_inv", (*shape[:-2], *grid))
        if scale.dtype not in _FLOATS:
            raise _wrong_dtype(scale, f"{', '.join(_FLOATS)} for the scales of an FP8 weight")
        return stored, scale


def _wrong_dtype(stored: StoredTensor, expected: str) -> CheckpointError:
    return CheckpointError(f"{stored.file}: tensor {stored.name}: dtype {stored.dtype}, expected {expected}")
