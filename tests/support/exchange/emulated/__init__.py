"""Runs the kernels of csrc/exchange/nvlink on the CPU, compiled against a small CUDA of ours.

Blocks are threads, their threads fibers, a launch returns when its kernel has ended. Ranks are processes that
share regions through memfd, so the exchange's own code runs here, from its Python to the last kernel. Of the
GPU's language only csrc/exchange/nvlink/access.cuh is replaced. Shows logic, not a GPU's memory order.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.machinery
import importlib.util
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pybind11
import torch
from torch.overrides import TorchFunctionMode

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
CSRC = ROOT / "csrc"
FLAGS = ("-std=c++20", "-O1", "-g1", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden")
MODULE = "ep_server._cuda"
ABI = sysconfig.get_config_var("SOABI")


@dataclass(frozen=True)
class Parts:
    """What a module is made of. roots: where headers are looked up, in this order. common: what all kernels
    include, compiled once.
    """

    name: str
    sources: tuple[Path, ...]
    roots: tuple[Path, ...]
    common: str


NVLINK = Parts(
    "emulated",
    (
        *sorted((CSRC / "exchange/nvlink").glob("*.cu")),
        CSRC / "exchange/nvlink/group.cpp",
        HERE / "bindings.cpp",
        HERE / "blocks.cpp",
        HERE / "runtime.cpp",
    ),
    (HERE, CSRC),
    "exchange/nvlink/wait.cuh",
)


def build(folder: Path, parts: Parts = NVLINK) -> Path:
    """The module's file, made anew where a source has changed; by several processes at once, too.

    Raises: CalledProcessError.
    """
    digest = hashlib.blake2b(repr((FLAGS, ABI)).encode(), digest_size=8)
    for path in sorted(
        p
        for root in parts.roots
        for p in root.rglob("*")
        if p.suffix in {".cu", ".cuh", ".cpp", ".hpp", ".h"}
    ):
        digest.update(path.read_bytes())
    made = folder / f"{parts.name}-{digest.hexdigest()}.so"
    if made.exists():
        return made
    flags = (*FLAGS, *(f"-I{root}" for root in parts.roots))
    includes = (f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}")

    def compile_one(source: Path) -> str:
        out = f"{scratch}/{source.name}.o"
        first = ("-include", str(kernels)) if source.suffix == ".cu" else ()
        subprocess.run(
            ["g++", *flags, *includes, *first, "-x", "c++", "-c", str(source), "-o", out], check=True
        )
        return out

    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        kernels = Path(scratch) / "kernels.h"
        kernels.write_text(f'#include "{parts.common}"\n')
        subprocess.run(["g++", *flags, "-x", "c++-header", str(kernels), "-o", f"{kernels}.gch"], check=True)
        with ThreadPoolExecutor() as pool:
            objects = list(pool.map(compile_one, parts.sources))
        linked = Path(scratch) / made.name
        subprocess.run(["g++", "-shared", "-pthread", *objects, "-o", str(linked)], check=True)
        return linked.rename(made)


class OnCpu(TorchFunctionMode):
    """Tensors that are asked for on a GPU are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0].clone()
        if kwargs and (device := kwargs.get("device")) and torch.device(device).type == "cuda":
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs or {})


class OneStream:
    """A stream, or an event of one, on which everything has ended when its call returns."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.synchronize = self.wait_stream = self.wait_event = lambda *_: None
        self.record = self.wait = self.synchronize
        self.record_event = lambda: self

    def query(self) -> bool:
        return True


def install(path: Path) -> None:
    """This process finds the emulation where the exchange looks for its kernels and for a GPU."""
    assert MODULE not in sys.modules, "the kernels for GPUs are loaded already"
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[MODULE] = module
    torch.cuda.current_stream = lambda *_: OneStream()  # type: ignore[assignment,return-value]
    torch.cuda.Stream = torch.cuda.Event = OneStream  # type: ignore[assignment,misc]
    torch.cuda.stream = torch.cuda.device = lambda *_: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[assignment,method-assign]
    torch.cuda._sleep = torch.cuda.synchronize = lambda *_: None
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=2)
    torch.cuda.is_available = lambda: True
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.device_count = lambda: 64
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda *_: None
    patch_exchange()
    patch_buffer()


def late_blocks(path: Path, microseconds: int) -> None:
    """From now on every second block of a kernel begins up to so late, as where a GPU has other work."""
    ctypes.CDLL(str(path)).emulated_late_blocks(microseconds)


def clock_ahead(path: Path, ns: int) -> None:
    """From now on the clock of this process's GPU is so far ahead."""
    ctypes.CDLL(str(path)).emulated_clock_ahead(ctypes.c_uint64(ns))


def hangs(path: Path, *, now: bool) -> None:
    """From now on the GPU of this process ends no more work, or all of it."""
    ctypes.CDLL(str(path)).emulated_hangs(int(now))


def multiprocessors(path: Path, count: int) -> None:
    """From now on the GPU of this process has so many: a kernel's blocks are at most as many."""
    ctypes.CDLL(str(path)).emulated_multiprocessors(count)


def patch_exchange() -> None:
    """Its tensors are on the CPU."""
    from ep_server.exchange.nvlink import exchange as cuda_exchange
    from ep_server.exchange.nvlink import launch as cuda_launch

    class Shapes(cuda_exchange.Shapes):  # type: ignore[misc]
        def __init__(self, spec: Any, device: torch.device, **options: Any) -> None:
            super().__init__(spec, torch.device("cpu"), **options)

    def regions(block: Any, device: Any = None) -> torch.Tensor:
        shape, (address, _) = (block.__cuda_array_interface__[k] for k in ("shape", "data"))
        memory = (ctypes.c_uint8 * (shape[0] * shape[1])).from_address(address)
        memory.owner = block  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8).view(shape)

    cuda_exchange.Shapes = Shapes  # type: ignore[misc]
    cuda_launch.torch = _Torch(regions)


def patch_buffer() -> None:
    """A Buffer's tensors are on the CPU, and its calls go where those of CUDA tensors go."""

    from ep_server.compat.deep_ep import events, sessions
    from ep_server.exchange.api import ExchangeSpec, Reduction
    from ep_server.exchange.bulk import ExchangeBulk
    from tests.support.exchange import buffer_user, gpu_group

    def make(group: Any, spec: ExchangeSpec, device: Any, waiting: Any, num_sms: int) -> Any:
        spec = replace(spec, reduction=Reduction.RANK)
        options = {"on_timeout": waiting.on_timeout, "num_sms": num_sms}
        return gpu_group.open_exchange(group, spec, device=0, **options)

    def make_bulk(group: Any, device: Any, timeout_ns: int, heap_bytes: int, network: Any) -> Any:
        if network.hosts:
            opened = partial(gpu_group.open_rows, group, network.hosts, timeout_ns)
            return ExchangeBulk(group.rank(), group.size(), opened, torch.device("cpu"))
        return gpu_group.open_bulk(group, torch.device("cuda", 0), timeout_ns, heap_bytes)

    sessions.from_process_group = make
    sessions.bulk_from_process_group = make_bulk
    sessions.HostStreams = lambda: events.Streams(torch.device("cuda", 0))  # type: ignore[misc,assignment]
    buffer_user.gpu_device = lambda _: torch.device("cpu")


class _Torch(ModuleType):
    """torch, but for the tensor that is made of a GPU's memory."""

    def __init__(self, as_tensor: Any) -> None:
        super().__init__("torch")
        self.as_tensor = as_tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
