"""The tensors of a checkpoint directory: their files, dtypes and shapes. Units: bytes.

Reads JSON and safetensors headers only, without torch.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ep_server.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Of one element. Every dtype of the format is here: a tensor that no model reads may have any.
_BITS = {
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz")
_MAX_HEADER = 100 << 20  # limit of the format
_META = "__metadata__"  # the one entry of a header that is no tensor
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def is_directory(path: Path) -> bool:
    """As Path.is_dir(), which raises for names that are too long and for folders that may not be searched."""
    try:
        return path.is_dir()
    except OSError:
        return False


def is_there(file: Path) -> bool:
    """False if nothing has that name. Raises: CheckpointError if something has, but it is not a file."""
    try:
        mode = file.stat().st_mode
    except FileNotFoundError as error:
        if file.is_symlink():
            raise CheckpointError(f"{file}: is a link to a file that does not exist") from error
        return False
    except (OSError, ValueError) as error:  # ValueError: characters that no file name has
        raise CheckpointError(f"{file}: cannot be read ({error})") from error
    if stat.S_ISREG(mode):
        return True
    kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
    raise CheckpointError(f"{file}: is {kind}, expected a file")


def read_file(file: Path) -> bytes:
    """All of a file. Raises: CheckpointError if it is missing, not a file or a git-lfs pointer."""
    is_there(file)  # refuses what is not a file; a missing one is refused below
    try:
        content = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    _refuse_pointer(file, content)
    return content


def read_json(file: Path) -> dict[str, Any]:
    """Reads one JSON object. Raises: as read_file(); CheckpointError if it is not an object."""
    try:
        value = json.loads(read_file(file).decode())
    except ValueError as error:
        raise CheckpointError(f"{file}: not valid JSON ({error})") from error
    except RecursionError as error:
        raise CheckpointError(f"{file}: not valid JSON (nested too deeply)") from error
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
    """All tensors of the shards by name, also those that the index leaves out, as in transformers."""

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
        single, index = directory / SINGLE, directory / INDEX
        indexed = is_there(index)
        if is_there(single):  # counts even beside an index, as in transformers
            return Checkpoint(directory, (single,), _read_header(single))
        if not indexed:
            raise _no_weights(directory)
        placed = _read_index(index)
        held = {file: _read_header(directory / file) for file in sorted(set(placed.values()))}
        for name, file in placed.items():
            if name not in held[file]:
                raise CheckpointError(f"{directory / file}: tensor {name} is missing (named by {INDEX})")
        shards = tuple(directory / file for file in held)
        tensors = {name: tensor for shard in held.values() for name, tensor in shard.items()}
        tensors |= {name: held[file][name] for name, file in placed.items()}  # decides if several hold one
        return Checkpoint(directory, shards, tensors)

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


def _no_weights(directory: Path) -> CheckpointError:
    """Says what is there instead."""
    try:
        names = sorted(file.name for file in directory.iterdir())
    except OSError:
        names = []
    message = f"{directory}: neither {SINGLE} nor {INDEX} is there"
    if loose := next((name for name in names if name.endswith(".safetensors")), ""):
        return CheckpointError(f"{message}: {loose} is only read if {INDEX} names it")
    if other := next((name for name in names if name.endswith(_OTHER_FORMATS)), ""):
        return CheckpointError(
            f"{message}: {other} is not read, only safetensors files are. To convert a checkpoint that "
            "transformers can load: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    return CheckpointError(message)


def _read_index(index: Path) -> dict[str, str]:
    """The shard of each tensor, as a path below the checkpoint directory."""
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    for name, file in placed.items():
        if not isinstance(file, str) or not _is_below(file):
            raise CheckpointError(
                f"{index}: weight_map: {name} = {file!r}: must be the path of a file below {index.parent}"
            )
    return placed


def _is_below(file: str) -> bool:
    path = PurePosixPath(file)
    return file.isprintable() and bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _refuse_pointer(file: Path, start: bytes) -> None:
    if start.startswith(_LFS_POINTER):
        raise CheckpointError(
            f"{file}: is a git-lfs pointer, not the file itself: run `git lfs pull` in {file.parent}"
        )


def _read_header(file: Path) -> dict[str, StoredTensor]:
    is_there(file)  # refuses what is not a file; a missing one is refused below
    try:
        with file.open("rb") as stream:
            _refuse_pointer(file, stream.read(len(_LFS_POINTER)))
            stream.seek(0)
            length = int.from_bytes(stream.read(8), "little")
            size = file.stat().st_size
            if not 0 < length <= min(_MAX_HEADER, size - 8):
                raise CheckpointError(f"{file}: not a safetensors file (header of {length} bytes)")
            header = json.loads(stream.read(length))
            data = range(8 + length, size)
    except OSError as error:
        raise CheckpointError(f"{file}: shard cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not a safetensors file ({error})") from error
    try:
        return {name: _entry(file, name, entry, data) for name, entry in header.items() if name != _META}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: not a safetensors file (malformed header: {error!r})") from error


def _entry(file: Path, name: str, entry: Mapping[str, Any], data: range) -> StoredTensor:
    """data: the bytes of the file behind its header."""
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    integers = all(type(number) is int for number in (*shape, begin, end))
    if not isinstance(dtype, str) or not isinstance(shape, list) or not integers or min(shape, default=0) < 0:
        raise ValueError(f"{name}: {entry!r}")
    tensor = StoredTensor(name, file, dtype, tuple(shape), data.start + begin, end - begin)
    bits = _BITS.get(dtype)
    fits = bits is None or 8 * tensor.nbytes == bits * tensor.size  # None: a dtype newer than this list
    if not 0 <= begin <= end <= len(data) or not fits:
        raise CheckpointError(
            f"{file}: tensor {name}: {tensor.dtype} {list(tensor.shape)} at bytes {begin} to {end} "
            f"does not fit the {len(data)} bytes of data"
        )
    return tensor
