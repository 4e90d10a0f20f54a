"""Whether rows of tensors on a device go to the network from the device itself; the exchange that does so.

Only where that is asked for: no network card has run it yet. Which way rows take is said in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch

from ep_server.errors import ConfigError, StartupError
from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.fabric import bootstrap as fabric_bootstrap
from ep_server.exchange.fabric.copies import checked_device, copies_for, visible_on
from ep_server.exchange.fabric.device import FabricDeviceExchange, Staging
from ep_server.exchange.fabric.device_rows import DeviceRows
from ep_server.exchange.fabric.exchange import FabricExchange, chosen
from ep_server.exchange.fabric.gpu_direct import RowsFabric
from ep_server.exchange.fabric.settings import FabricOptions
from ep_server.exchange.shm import ShmExchange
from ep_server.exchange.waiting import Waiting

LOG = logging.getLogger(__name__)


class DeviceMemory(StrEnum):
    """How rows of a device reach the network. All ranks choose alike."""

    AUTO = "auto"  # HOST, until HMEM has run on a network card
    HMEM = "hmem"  # the card reads and writes the device's memory
    HOST = "host"  # through host memory


def open_end(
    spec: ExchangeSpec,
    device: torch.device,
    wanted: DeviceMemory | str,
    options: FabricOptions,
    waiting: Waiting | None,
    through_host: Callable[[], FabricExchange],
) -> FabricExchange:
    """This rank's end, not yet connected: a RowsFabric, or what through_host() opens.

    Raises: ConfigError for another word; StartupError naming provider and capability where HMEM is asked for
      and cannot be.
    """
    if wanted not in list(DeviceMemory):
        raise ConfigError("device_memory", wanted, f"one of {', '.join(DeviceMemory)}")
    if wanted == DeviceMemory.HMEM:
        return _direct(spec, device, options, waiting)
    if wanted == DeviceMemory.AUTO and device.type != "cpu":
        LOG.info(
            "rows travel through host memory: exchange.device_memory = auto does not take hmem, "
            "which has not run on a network card yet"
        )
    return through_host()


def on_device(inner: ShmExchange, device: torch.device) -> FabricDeviceExchange:
    """The exchange of tensors on the device over open_end()'s, or over any in host memory; owns it."""
    staging = Staging.GPU_DIRECT if isinstance(inner, RowsFabric) else Staging.HOST
    return FabricDeviceExchange(inner, device, staging=staging)


def from_process_group(
    group: Any,
    spec: ExchangeSpec,
    device: torch.device | str | int,
    options: FabricOptions | None = None,
    wanted: DeviceMemory | str = DeviceMemory.AUTO,
) -> FabricDeviceExchange:
    """fabric_bootstrap.from_process_group for tensors of `device`, every rank a host of its own. Collective.

    Returns: once every rank has its device and staging.
    Raises: as that does, on all ranks; StartupError where ranks do not choose alike.
    """
    found, options = checked_device(device), options or FabricOptions()

    def make() -> FabricExchange:
        return open_end(spec, found, wanted, options, None, lambda: FabricExchange(spec, options))

    exchange = on_device(fabric_bootstrap.from_process_group(group, spec, options, make=make), found)
    exchange.barrier()
    return exchange


def _direct(
    spec: ExchangeSpec, device: torch.device, options: FabricOptions, waiting: Waiting | None
) -> RowsFabric:
    visible_on(device)  # raises where rows would not be seen
    chosen(options, device_memory=True)  # ... where nobody reaches them: before memory is taken
    try:
        rows = DeviceRows.allocate(spec, device)
    except torch.OutOfMemoryError as error:
        raise StartupError(f"{device} has no room for the rows of the exchange: {error}") from error
    # Kernels of who had this memory before may still be queued, and cards do not wait for streams.
    copies_for(device, spec.timeout_ns).fetch()()
    opened = RowsFabric(spec, rows, options, waiting)
    LOG.info(
        "the card reads and writes rows on %s itself: %.1f MiB are registered (FI_HMEM)",
        device,
        rows.bytes / 2**20,
    )
    return opened
