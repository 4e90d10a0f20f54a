"""Ends of exchanges whose rows lie on a device, for which poisoned memory of the host stands.

Two providers take such memory (FI_HMEM): shm, which both libraries have, and the wrapped one, which hears of
another kind of device than the one below it.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.fabric.device import FabricDeviceExchange
from ep_server.exchange.fabric.device_rows import DeviceRows
from ep_server.exchange.fabric.link import FabricLink
from ep_server.exchange.fabric.settings import FabricOptions
from ep_server.exchange.spec import Waiting
from tests.support.fabric.fabric_ends import LIBRARIES, Gather, connected, needs, through_file, through_group
from tests.support.fabric.wrapped import Wrapped

CPU = torch.device("cpu")
GPU_3 = 3  # the number of a device that is not there
SHM_BYTES = 17 << 20
_names = count()


def over_shm(library: str = "system") -> FabricOptions:
    """The provider shm, which copies. Its addresses are names that nobody else on this machine has."""
    needs(library)
    # 16 MiB an endpoint; it looks for room for as many as there are cores before it offers itself.
    wanted = max(4, os.cpu_count() or 1) * SHM_BYTES
    if shutil.disk_usage("/dev/shm").free < wanted:
        pytest.skip(f"/dev/shm has less than {wanted >> 20} MiB")
    return FabricOptions(LIBRARIES[library], "shm", address="named by own_name", device_copies=True)


def over_card(folder: Path, library: str = "system", disorder: int = 0, **how: object) -> FabricOptions:
    """A provider over TCP that wants memory registered as cards do, that of devices too."""
    needs(library)
    made = Wrapped(library=library, strict=True, hmem=True, **how).build(folder)  # type: ignore[arg-type]
    return FabricOptions(str(made), address="127.0.0.1", disorder=disorder)


def own_name(options: FabricOptions) -> FabricOptions:
    """With a name for one more endpoint of this process, where that is the provider's address."""
    if options.provider != "shm":
        return options
    return replace(options, address=f"ep-server-{os.getpid()}-{next(_names)}")


def forget_the_dead() -> None:
    """Removes what shm leaves in memory, 16 MiB each, of endpoints whose process or peers were killed."""
    for file in Path("/dev/shm").glob("ep-server-*-*:*:*"):
        if not Path("/proc", file.name.split("-")[2]).exists():
            file.unlink(missing_ok=True)


def poisoned_rows(spec: ExchangeSpec, kind: int = DeviceRows.CUDA, number: int = GPU_3) -> DeviceRows:
    """All NaN until something is written. kind, number: what the provider hears of it."""
    return replace(poisoned_on(CPU, spec), kind=kind, number=number)


def poisoned_on(device: torch.device, spec: ExchangeSpec) -> DeviceRows:
    rows = DeviceRows.allocate(spec, device)
    rows.inbound.fill_(255)
    rows.outbound.fill_(255)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the card does not wait for streams
    return rows


def make(options: FabricOptions, spec: ExchangeSpec, group: dist.ProcessGroup) -> FabricDeviceExchange:
    """Collective. shm is told of host memory, as it would touch it as that of a device."""
    kind, number = (DeviceRows.HOST, 0) if options.provider == "shm" else (DeviceRows.CUDA, GPU_3)
    return over(poisoned_rows(spec, kind, number), own_name(options), through_group(group))


def make_on(
    device: torch.device, options: FabricOptions, spec: ExchangeSpec, group: dist.ProcessGroup
) -> FabricDeviceExchange:
    """The same of a GPU's memory, which the provider hears of as such."""
    return over(poisoned_on(device, spec), own_name(options), through_group(group))


def over(
    rows: DeviceRows, options: FabricOptions, gather: Gather, waiting: Waiting | None = None
) -> FabricDeviceExchange:
    """Collective."""
    inner = connected(FabricLink(rows.spec, options, waiting, rows=rows), gather)
    return FabricDeviceExchange(inner, rows.inbound.device, rows)


@dataclass(frozen=True)
class DirectEnd:
    """One rank's, for tests.support.exchange.ranks: where all meet (a file), its network."""

    meeting: str
    options: FabricOptions

    def open(self, spec: ExchangeSpec, **waiting: Any) -> FabricDeviceExchange:
        rows = poisoned_rows(spec, DeviceRows.HOST, 0)
        return over(rows, own_name(self.options), through_file(self.meeting, spec), Waiting(**waiting))
