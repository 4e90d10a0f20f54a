"""Whether a GPU's kernels see what a network card has written into its memory before the host heard of it.

The card's writes to the GPU and its notice to the host take different ways over PCIe, and are not ordered
everywhere. The driver says whether they are, and else flushes them.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch

from ep_server.errors import EpServerError, ExchangeError, StartupError

# Of cuda.h.
_FLUSH_OPTIONS, _ORDERING = 117, 118  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_...
_OWNER = 100  # writes are seen by the device that owns the memory; the scope of a flush as well
_FLUSH_BY_HOST = 1


class Visible(Protocol):
    """Called when the host has heard that rows came, before kernels that read them are launched."""

    def settle(self) -> None:
        """Kernels launched from now on see them."""
        ...


class Ordered:
    """Where they are seen at once."""

    def settle(self) -> None:
        """As the Protocol says."""


class Flushed:
    """Where the driver has to flush them."""

    def __init__(self, driver: ctypes.CDLL, device: torch.device) -> None:
        self._driver, self._device = driver, device

    def settle(self) -> None:
        """As the Protocol says; the host waits for the flush. Raises ExchangeError where it fails."""
        with torch.cuda.device(self._device):
            result = self._driver.cuFlushGPUDirectRDMAWrites(0, _OWNER)
        _check(result, "cuFlushGPUDirectRDMAWrites", ExchangeError)


def visible_on(device: torch.device) -> Visible:
    """For rows on this device. Raises StartupError where its driver can neither order nor flush writes."""
    if device.type != "cuda":
        return Ordered()
    torch.cuda.current_stream(device)  # the driver is at work from here on
    driver = ctypes.CDLL("libcuda.so.1")
    if _attribute(driver, _ORDERING, device) >= _OWNER:
        return Ordered()
    if not _attribute(driver, _FLUSH_OPTIONS, device) & _FLUSH_BY_HOST:
        raise StartupError(
            f"{device}: its driver neither orders nor flushes what network cards write into its memory: "
            "exchange.device_memory = host"
        )
    return Flushed(driver, device)


def _attribute(driver: ctypes.CDLL, name: int, device: torch.device) -> int:
    found = ctypes.c_int()
    result = driver.cuDeviceGetAttribute(ctypes.byref(found), name, device.index)
    _check(result, "cuDeviceGetAttribute", StartupError)
    return found.value


def _check(result: int, what: str, failure: type[EpServerError]) -> None:
    if result != 0:
        raise failure(f"{what}: error {result} of the CUDA driver")
