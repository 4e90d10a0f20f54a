"""csrc/loading compiled against a runtime whose copies are late, to read files into memory of the host."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sysconfig
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pybind11
import torch

from ep_server.backends.gpu.staged_files import BUFFERS, NativeReader, Piece
from tests.support.once import locked

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
SOURCES = (HERE / "late_copies.cpp", HERE / "cuda_runtime_api.h", ROOT / "csrc/bindings/loading.cpp")
FLAGS = (
    "-std=c++20",
    "-O1",
    "-g1",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
)


@cache
def module() -> Any:
    """Compiled once for a state of the sources."""
    digest = hashlib.blake2b(repr((FLAGS, sysconfig.get_config_var("SOABI"))).encode(), digest_size=8)
    for source in (*SOURCES, *sorted((ROOT / "csrc/loading").iterdir())):
        digest.update(source.read_bytes())
    folder = ROOT / "build" / "late_copies"
    made = folder / f"{digest.hexdigest()}.so"
    with locked(folder / "lock"):
        if not made.exists():
            includes = (HERE, ROOT / "csrc", pybind11.get_include(), sysconfig.get_paths()["include"])
            command = ["g++", *FLAGS, *(f"-I{one}" for one in includes), str(SOURCES[0]), "-o", f"{made}.new"]
            subprocess.run(command, check=True)
            Path(f"{made}.new").rename(made)
    spec = importlib.util.spec_from_file_location("late_copies", made)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


class LateCopies:
    """See staged_files.Copies. One at a time in a process. Buffers that nobody holds are overwritten.

    most_read: bytes that a read returns at most. hangs: no copy ever ends. fails: the device is lost.
    asked: pieces that each reader was asked for.
    """

    device = torch.device("cpu")

    def __init__(self, *, most_read: int = 1 << 40, hangs: bool = False, fails: bool = False) -> None:
        self.asked: list[list[Piece]] = []
        module().reset(hangs, fails, most_read)

    def reader(self, buffer_bytes: int) -> LateReader:
        memory = torch.empty(BUFFERS, buffer_bytes, dtype=torch.uint8)
        buffers = memory[:]
        weakref.finalize(buffers, memory.fill_, 0xEE)
        self.asked.append([])
        return LateReader(module(), 0, buffers, int, self.asked[-1])

    def finish(self) -> None:
        module().finish()


class LateReader(NativeReader):
    """asked: gets all that it is asked for."""

    def __init__(
        self, module: Any, device: int, buffers: torch.Tensor, stream: Callable[[], int], asked: list[Piece]
    ) -> None:
        super().__init__(module, device, buffers, stream)
        self._asked = asked

    def read(self, pieces: Sequence[Piece]) -> tuple[int, str] | None:
        self._asked += pieces
        return super().read(pieces)
