"""Ends of exchanges over libfabric for the ranks of a test: which library, which network namespace."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ep_server import _C
from ep_server.errors import StartupError
from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.fabric import bootstrap as fabric_bootstrap
from ep_server.exchange.fabric.exchange import FabricExchange, FabricOptions, providers
from ep_server.exchange.waiting import Waiting

CLONE_NEWNET = 0x40000000


def _of_the_wheel() -> str:
    """Where it is, also if it was installed elsewhere than this Python."""
    try:
        found = [file for file in files("mpich") or () if file.name == "libfabric.so.1"]
    except PackageNotFoundError:
        found = []
    return str(found[0].locate()) if found else "libfabric.so.1 of the mpich wheel"


# Debian's 1.x, and the 2.x that the mpich wheel brings: the same code must run on both. For GPUs also what
# scripts/libfabric_cuda builds.
BUILT = Path(__file__).parents[3] / "build/gpu/hmem/libfabric.so.1"
LIBRARIES = {"system": "", "wheel": _of_the_wheel(), "cuda": str(BUILT)}


@cache
def usable(library: str) -> str:
    """ "" or why this libfabric cannot be tested here."""
    if not _C.FABRIC:
        return "built without the headers of libfabric (libfabric-dev)"
    try:
        providers(loopback(library))
    except StartupError as error:
        return str(error)
    return ""


def loopback(library: str = "system", **options: Any) -> FabricOptions:
    """The network of one machine alone."""
    return FabricOptions(library=LIBRARIES[library], address="127.0.0.1", **options)


def needs(library: str) -> None:
    """Skips the test where this libfabric is not there."""
    if why := usable(library):
        pytest.skip(why)


@dataclass(frozen=True)
class FabricEnd:
    """One rank's: where all meet (a file), its network, and the network namespace that it moves to."""

    meeting: str
    options: FabricOptions
    namespace: str = ""

    def open(self, spec: ExchangeSpec, **waiting: Any) -> FabricExchange:
        if self.namespace:
            enter(self.namespace)
        store = dist.FileStore(self.meeting, spec.num_ranks)
        return fabric_bootstrap.from_store(store, "group", spec, self.options, Waiting(**waiting))


def ends(folder: Path, num_ranks: int, options: FabricOptions) -> list[FabricEnd]:
    """Of ranks on the loopback."""
    return [FabricEnd(str(folder / "meeting"), options)] * num_ranks


def enter(namespace: str) -> None:
    """Moves this process into a named network namespace."""
    fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    finally:
        os.close(fd)
