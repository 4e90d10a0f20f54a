"""Reads tensors of a checkpoint by name: opens shards, reads them, widens FP8 or keeps its codes."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import torch

from ep_server.errors import CheckpointError
from ep_server.models.checkpoint import Checkpoint, StoredTensor


class Codes(NamedTuple):
    """A matrix as it is stored. values: [n, k] float8_e4m3fn. scale: [ceil(n / rows), ceil(k / columns)]
    float32, of blocks of rows x columns."""

    values: torch.Tensor
    scale: torch.Tensor


def widen(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Codes [..., n, k] and the scales of their blocks to float32 [..., n, k]."""
    rows, columns = values.shape[-2:]
    spread = scale.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)
    return values.float() * spread[..., :columns]


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

    def load(self, stored: StoredTensor, part: int | None = None) -> torch.Tensor:
        """The values of a tensor, or of entry `part` of its first dimension.

        Returns: a new tensor on the files' device. Work of its current stream finds the values there.
        Raises: CheckpointError naming file and tensor if they cannot be read.
        """
        ...

    def fill(self, into: torch.Tensor, stored: StoredTensor, part: int | None = None) -> None:
        """As load(), into memory that is contiguous and of their dtype and shape, with the next flush()."""
        ...

    def flush(self) -> None:
        """Work of the current stream finds what this thread's fill() was asked for. Raises: as load()."""
        ...

    def finish(self) -> None:
        """Returns when all values are where they belong."""
        ...


class OpenShards:
    """Descriptors of shards. Each is opened when the first tensor of it is loaded, once for all threads.

    A context: they are closed behind it.
    """

    def __init__(self) -> None:
        self._closing = ExitStack()
        self._open: dict[Path, int] = {}
        self._opening = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    def shard(self, file: Path) -> int:
        """The descriptor of an open shard. Raises: OSError."""
        with self._opening:
            if file not in self._open:
                self._open[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                self._closing.callback(os.close, self._open[file])
            return self._open[file]


class PlainFiles(OpenShards):
    """See TensorFiles. Reads into host memory, and copies from there if the device is another one.

    Not through mappings: a file that shrinks or a disk that fails would end the process, without an error.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def load(self, stored: StoredTensor, part: int | None = None) -> torch.Tensor:
        """See TensorFiles."""
        shape = stored.shape if part is None else stored.shape[1:]
        values = torch.empty(shape, dtype=TORCH[stored.dtype])
        self._read(values, stored, part)
        return values.to(self._device)

    def fill(self, into: torch.Tensor, stored: StoredTensor, part: int | None = None) -> None:
        """See TensorFiles. Read at once. Raises: as load()."""
        if into.device.type == "cpu":
            self._read(into, stored, part)
        else:
            into.copy_(self.load(stored, part))

    def flush(self) -> None:
        """Nothing: they are there when fill() returns."""

    def finish(self) -> None:
        """Nothing: they are there when load() returns."""

    def _read(self, into: torch.Tensor, stored: StoredTensor, part: int | None) -> None:
        wanted = into.view(-1).view(torch.uint8).numpy().data
        at = stored.begin + (part or 0) * into.nbytes
        try:
            file = self.shard(stored.file)
            while wanted:
                if not (count := os.preadv(file, [wanted], at)):
                    raise unreadable(stored, f"the file ends at byte {at}")
                wanted, at = wanted[count:], at + count
        except OSError as error:
            raise unreadable(stored, error) from error


def unreadable(stored: StoredTensor, why: object) -> CheckpointError:
    """A tensor cannot be read."""
    return CheckpointError(f"{stored.file}: tensor {stored.name}: cannot be read ({why})")


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
        """read()'s values into contiguous memory on the device, of any dtype, with the next flush()."""
        ...

    def is_fp8(self, name: str) -> bool:
        """There is a tensor of that name and it is FP8: copy_codes() may be called."""
        ...

    def copy_codes(self, into: Codes, name: str, shape: tuple[int, ...], part: int | None = None) -> None:
        """A matrix whose widened values are read()'s, or entry `part` of a stack of them, as copy() does."""
        ...

    def flush(self) -> None:
        """Work of the device's current stream finds what this thread asked copy() and copy_codes() for."""
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

    def flush(self) -> None:
        """See TensorSource. Raises: CheckpointError naming a tensor that cannot be read."""
        self._files.flush()

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
            self._files.fill(into, stored, part)
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
