"""Writes a checkpoint of a shape as fast as a disk takes it, with content that can be checked anywhere.

Names, dtypes and shapes are those that the loader asks for, which are those of the released checkpoints;
tensors lie in shards in the order of the model and in a shard in the order of their names, as there. All are
cut out of one pattern of hashed numbers, each from a place that its name decides; no float in it is NaN.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch

from ep_server.backends.torch_compute import TorchCompute
from ep_server.models.checkpoint import INDEX
from ep_server.models.families import ModelSpec, read_spec
from ep_server.models.loading import Codes
from ep_server.models.weights import weights_from

SHAPES = Path(__file__).parent / "shapes"
SHARD_BYTES = 4_000_000_000
PATTERN_WORDS = 16_777_259  # a prime: no tensor's size is a multiple
_BYTES = {"BF16": 2, "F8_E4M3": 1}
_META = torch.device("meta")


class Planned(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * _BYTES[self.dtype]


class Asked:
    """See `tensors.TensorSource`: of no content, notes what is asked for. FP8 scales are bfloat16."""

    def __init__(self, block: tuple[int, int] | None) -> None:
        self.planned: list[Planned] = []
        self._block = block

    def has(self, name: str) -> bool:
        """Nothing is there: the loader takes the first layout it knows, one tensor per expert."""
        return False

    def read(self, name: str, shape: tuple[int, ...], part: int | None = None) -> torch.Tensor:
        """Notes it."""
        assert part is None
        if self._block is None or not self.is_fp8(name):
            self.planned.append(Planned(name, "BF16", shape))
            return torch.empty(shape, device=_META)
        grid = tuple(-(-size // block) for size, block in zip(shape, self._block, strict=True))
        self.planned.append(Planned(name, "F8_E4M3", shape))
        self.planned.append(Planned(f"{name}_scale_inv", "BF16", grid))
        return torch.empty(shape, device=_META)

    def copy(self, into: torch.Tensor, name: str, shape: tuple[int, ...], part: int | None = None) -> None:
        """Notes it."""
        self.read(name, shape, part)

    def is_fp8(self, name: str) -> bool:
        """All projections of such a checkpoint are."""
        return self._block is not None and name.endswith("proj.weight")

    def copy_codes(self, into: Codes, name: str, shape: tuple[int, ...], part: int | None = None) -> None:
        """Notes it."""
        self.read(name, shape, part)

    def flush(self) -> None:
        """Nothing."""

    def read_vector(self, name: str, lengths: tuple[int, ...]) -> torch.Tensor | None:
        """None."""
        return None


def planned(spec: ModelSpec) -> list[Planned]:
    """All tensors of a model, in the order in which one thread loads them."""
    asked = Asked(spec.quant_block)
    weights_from(asked, spec, range(spec.router.num_experts), torch.bfloat16, TorchCompute(_META))
    return asked.planned


class Pattern:
    """What all tensors are cut out of. Made once, 64 MiB.

    servable: bfloat16 values from 2^-6 to 2^-5 of either sign, so that logits stay small.
    seed: checkpoints of other seeds have other values.
    """

    def __init__(self, *, servable: bool = False, seed: int = 0) -> None:
        hashed = torch.arange(PATTERN_WORDS) * -7046029254386353131  # 2^64 / golden ratio, odd
        words = (hashed ^ (hashed >> 29)).to(
            torch.int32
        ) & -0x40404041  # 0xBFBFBFBF: neither NaN nor infinite
        if servable:
            words = words & -0x7F807F81 | 0x3C803C80  # 0x807F807F: sign and fraction; exponent -6
        self._bytes, self._seed = words.view(torch.uint8), seed

    def pieces(self, name: str, nbytes: int) -> Iterator[torch.Tensor]:
        """The bytes of a tensor: views one after the other."""
        digest = hashlib.blake2b(f"{self._seed or ''}{name}".encode(), digest_size=8).digest()
        at, left = int.from_bytes(digest, "little") % PATTERN_WORDS * 4, nbytes
        while left:
            piece = self._bytes[at : at + left]
            yield piece
            at, left = 0, left - len(piece)

    def expected(self, name: str, values: torch.Tensor) -> bool:
        """Whether `values`, on any device, are all bytes of that tensor."""
        got = values.contiguous().view(-1).view(torch.uint8)
        return torch.equal(got.cpu(), torch.cat(list(self.pieces(name, len(got)))))


def write(folder: Path, shape: str, layers: int, threads: int, pattern: Pattern | None = None) -> ModelSpec:
    """A checkpoint of benchmarks/shapes/`shape` of so many layers (0 = its own), into an empty folder.

    pattern: of the values; None = any.
    """
    values = json.loads((SHAPES / shape / "config.json").read_text())
    values["num_hidden_layers"] = layers or values["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(values))
    spec = read_spec(str(folder))
    shards = _shards(planned(spec))
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    placed = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    jobs = [_begun(folder / name, shard) for name, shard in zip(names, shards, strict=True)]
    values_of = pattern or Pattern()

    def fill(job: tuple[int, int, Planned]) -> None:
        file, at, tensor = job
        for piece in values_of.pieces(tensor.name, tensor.nbytes):
            _put(file, piece.numpy().data, at)
            at += len(piece)

    with ThreadPoolExecutor(threads) as pool:  # in all shards at once: a file has one writer at a time
        for _ in pool.map(fill, [job for row in zip_longest(*jobs) for job in row if job is not None]):
            pass
    for shard_jobs in jobs:
        os.close(shard_jobs[0][0])
    return spec


def _shards(tensors: Sequence[Planned]) -> list[list[Planned]]:
    shards: list[list[Planned]] = [[]]
    size = 0
    for tensor in tensors:
        if size + tensor.nbytes > SHARD_BYTES and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return [sorted(shard) for shard in shards]


def _begun(path: Path, tensors: Sequence[Planned]) -> list[tuple[int, int, Planned]]:
    """Writes the header. Returns (open file, where its bytes begin, tensor) of each."""
    header, begins, at = {}, [], 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        begins.append(at)
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    start = len(text).to_bytes(8, "little") + text
    _put(file, memoryview(start), 0)
    return [(file, len(start) + begin, tensor) for begin, tensor in zip(begins, tensors, strict=True)]


def _put(file: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written
