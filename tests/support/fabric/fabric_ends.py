"""Ends of exchanges over libfabric for the ranks of a test: which library, which network namespace."""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Callable
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
from ep_server.exchange.fabric.link import FabricLink
from ep_server.exchange.fabric.settings import FabricOptions
from ep_server.exchange.host import HostExchange
from ep_server.exchange.spec import Waiting
from ep_server.testing.namespaces import enter


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


def providers(options: FabricOptions) -> list[str]:
    """Names of those that can be used, in the order of preference. Raises StartupError."""
    return [name for name, _, _, missing in _C.fabric_providers(options.native()) if not missing]


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

    def open(self, spec: ExchangeSpec, **waiting: Any) -> HostExchange:
        if self.namespace:
            enter(self.namespace)
        return connected(FabricLink(spec, self.options, Waiting(**waiting)), through_file(self.meeting, spec))


Gather = Callable[[Any], list[Any]]  # this rank's value for those of all ranks


def through_file(path: str, spec: ExchangeSpec) -> Gather:
    """Once for each path."""

    def gather(mine: Any) -> list[Any]:
        store = dist.FileStore(path, spec.num_ranks)
        store.set(str(spec.rank), pickle.dumps(mine))
        return [pickle.loads(store.get(str(rank))) for rank in range(spec.num_ranks)]

    return gather


def through_group(group: dist.ProcessGroup) -> Gather:
    def gather(mine: Any) -> list[Any]:
        everyone = [None] * group.size()
        dist.all_gather_object(everyone, mine, group=group)
        return everyone

    return gather


def connected(link: FabricLink, gather: Gather) -> HostExchange:
    """Its exchange, once all ranks have connected. Collective."""
    exchange = link.exchange()
    try:
        everyone = gather((link.address, secrets.randbits(17)))
        link.connect([address for address, _ in everyone], everyone[0][1])
        exchange.barrier()
    except BaseException:
        exchange.close()
        raise
    return exchange


def ends(folder: Path, num_ranks: int, options: FabricOptions) -> list[FabricEnd]:
    """Of ranks on the loopback."""
    return [FabricEnd(str(folder / "meeting"), options)] * num_ranks
