"""The tensors of a checkpoint directory: which file holds which, of what dtype and shape.

Reads JSON and safetensors headers only; knows nothing of torch, models or ranks. Units: bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ep_server.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8, "I32": 4, "U8": 1, "I8": 1}
_MAX_HEADER = 100 << 20  # limit of the format
_META = "__metadata__"  # the one entry of a header that is no tensor


def read_json(file: Path) -> dict[str, Any]:
    """Reads one JSON object. Raises: CheckpointError if it is missing or not an object."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds {type(value).__name__}, expected an object")
    return value


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file. dtype is the name in the file: F32, BF16, F16, F8_E4M3, ...

    begin: where its bytes begin, from the start of the file.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of a directory by name."""

    path: Path
    shards: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]

    @staticmethod
    def open(path: str | Path) -> Checkpoint:
        """Reads the headers of all shards.

        Raises: CheckpointError naming the file for a missing or broken shard, or a tensor that the index
            places in a shard which does not hold it.
        """
        directory = Path(path)
        index = directory / INDEX
        if not index.is_file():
            shards = (directory / SINGLE,)
            if not shards[0].is_file():
                raise CheckpointError(f"{directory}: neither {SINGLE} nor {INDEX} is there")
            return Checkpoint(directory, shards, _read_header(shards[0]))
        placed = read_json(index).get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise CheckpointError(f"{index}: weight_map is missing or empty")
        shards = tuple(directory / name for name in sorted(set(placed.values())))
        held = {shard.name: _read_header(shard) for shard in shards}
        for name, file in placed.items():
            if name not in held[file]:
                raise CheckpointError(f"{directory / file}: tensor {name} is missing (named by {INDEX})")
        return Checkpoint(directory, shards, {name: held[file][name] for name, file in placed.items()})

    def find(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """The tensor of that name. Raises: CheckpointError if it is missing or of another shape."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.path}: tensor {name} {list(shape)} is missing")
        if tensor.shape != shape:
            raise CheckpointError(
                f"{tensor.file}: tensor {name}: expected shape {list(shape)}, found {list(tensor.shape)}"
            )
        return tensor


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= _MAX_HEADER:
                raise CheckpointError(f"{file}: not a safetensors file (header of {length} bytes)")
            header = json.loads(stream.read(length))
            data = range(8 + length, file.stat().st_size)
    except OSError as error:
        raise CheckpointError(f"{file}: shard cannot be read ({error.strerror})") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: not a safetensors file ({error})") from error
    try:
        return {name: _entry(file, name, entry, data) for name, entry in header.items() if name != _META}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: not a safetensors file (malformed header: {error!r})") from error


def _entry(file: Path, name: str, entry: Mapping[str, Any], data: range) -> StoredTensor:
    """data: the bytes of the file behind its header."""
    begin, end = entry["data_offsets"]
    size = end - begin
    tensor = StoredTensor(name, file, entry["dtype"], tuple(entry["shape"]), data.start + begin, size)
    if not 0 <= begin <= end <= len(data) or size != tensor.size * _ITEM_BYTES.get(tensor.dtype, 0):
        raise CheckpointError(
            f"{file}: tensor {name}: {tensor.dtype} {list(tensor.shape)} at bytes {begin} to {end} "
            f"does not fit the {len(data)} bytes of data"
        )
    return tensor
