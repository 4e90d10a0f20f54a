"""Whether rows of tensors on a device go to the network from the device itself; the exchange that does so.

Chosen by what the provider can do (FI_HMEM), the driver and the memory; said in the log, with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch

from ep_server.ep import fabric_bootstrap
from ep_server.ep.bounce import BounceExchange
from ep_server.ep.bounce_copies import checked_device
from ep_server.ep.device_rows import DeviceRows
from ep_server.ep.direct import DirectExchange
from ep_server.ep.exchange import ExchangeSpec
from ep_server.ep.fabric import FabricExchange, chosen
from ep_server.ep.fabric_rows import RowsFabric
from ep_server.ep.fabric_settings import FabricOptions
from ep_server.ep.native import NativeExchange
from ep_server.ep.remote_writes import visible_on
from ep_server.ep.waiting import Waiting
from ep_server.errors import StartupError

LOG = logging.getLogger(__name__)


class DeviceMemory(StrEnum):
    """How rows of a device reach the network. All ranks choose alike."""

    AUTO = "auto"  # HMEM where it can be
    HMEM = "hmem"  # the card reads and writes the device's memory
    HOST = "host"  # through host memory


def open_end(
    spec: ExchangeSpec,
    device: torch.device,
    wanted: DeviceMemory,
    options: FabricOptions,
    waiting: Waiting | None,
    through_host: Callable[[], FabricExchange],
) -> FabricExchange:
    """This rank's end, not yet connected: a RowsFabric, or what through_host() opens.

    Raises: StartupError naming provider and capability where HMEM is asked for and cannot be.
    """
    if wanted is DeviceMemory.HOST:
        return through_host()
    if wanted is DeviceMemory.HMEM:
        return _direct(spec, device, options, waiting)
    why = "tensors are in host memory"
    if device.type != "cpu":
        try:
            return _direct(spec, device, options, waiting)
        except StartupError as error:
            why = str(error)
        torch.cuda.empty_cache()  # memory that could not be registered is other users' again
    LOG.info("rank %d: rows travel through host memory: %s", spec.rank, why)
    return through_host()


def on_device(inner: NativeExchange, device: torch.device) -> BounceExchange:
    """The exchange of tensors on the device over open_end()'s, or over any in host memory; owns it."""
    return DirectExchange(inner) if isinstance(inner, RowsFabric) else BounceExchange(inner, device)


def from_process_group(
    group: Any,
    spec: ExchangeSpec,
    device: torch.device | str | int,
    options: FabricOptions | None = None,
    wanted: DeviceMemory = DeviceMemory.AUTO,
) -> BounceExchange:
    """fabric_bootstrap.from_process_group for tensors of `device`, every rank a host of its own. Collective.

    Raises: as that does, on all ranks; StartupError where ranks do not choose alike.
    """
    found, options = checked_device(device), options or FabricOptions()

    def make() -> FabricExchange:
        return open_end(spec, found, wanted, options, None, lambda: FabricExchange(spec, options))

    return on_device(fabric_bootstrap.from_process_group(group, spec, options, make=make), found)


def _direct(
    spec: ExchangeSpec, device: torch.device, options: FabricOptions, waiting: Waiting | None
) -> RowsFabric:
    visible_on(device)  # raises where rows would not be seen
    chosen(options, device_memory=True)  # ... where nobody reaches them: before memory is taken
    try:
        rows = DeviceRows.allocate(spec, device)
    except torch.OutOfMemoryError as error:
        raise StartupError(f"{device} has no room for the rows of the exchange: {error}") from error
    opened = RowsFabric(spec, rows, options, waiting)
    LOG.info(
        "rank %d: the card reads and writes rows on %s itself: %.1f MiB are registered (FI_HMEM)",
        spec.rank,
        device,
        rows.bytes / 2**20,
    )
    return opened
