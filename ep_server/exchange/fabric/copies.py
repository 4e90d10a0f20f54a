"""Copies between a device and the host memory that an exchange on the CPU reads and writes.

Copies to the host run on the caller's stream. The host waits for them only, because it sends their data.
Copies to the device run on their own stream, in parallel with the caller's kernels; the caller's stream waits
once all are enqueued. The staging that a copy reads belongs to a slot, and is written again only after the
copy has ended. Nothing waits for a whole device. Durations in ns.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Protocol

import torch

from ep_server.errors import ConfigError, EpServerError, ExchangeError, InvalidArgument, StartupError

Pair = tuple[torch.Tensor, torch.Tensor]  # where to, where from
Arrival = Callable[[], None]  # waits for copies to the host; called once before their targets are used again


class Slot:
    """Staging of one operation. ended: after the last copy that reads it; None = nothing does."""

    __slots__ = ("ended",)

    def __init__(self) -> None:
        self.ended: torch.cuda.Event | None = None


class Delivery(Protocol):
    """Copies from the staging of one slot to the device. Each runs while the host prepares the next."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor on the device that these copies may write immediately."""
        ...

    def copy(self, out: torch.Tensor, staged: torch.Tensor) -> None:
        """Begins a copy; same shape and dtype, both contiguous."""
        ...

    def finish(self) -> None:
        """Makes the caller's stream wait for all copies. The slot is busy until they have ended."""
        ...


class Copies(Protocol):
    """Copies tensors of one kind of device to the host and back."""

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that copies may read and write."""
        ...

    def check_stream(self) -> None:
        """Raises InvalidArgument where the caller's stream is captured into a graph."""
        ...

    def fetch(self, *pairs: Pair) -> Arrival:
        """Begins copies from device to host, after the current work of the caller's stream.

        Returns: a wait for them. Without copies, a wait for the current work of the stream.
        """
        ...

    def reuse(self, slot: Slot) -> None:
        """Returns once nothing reads the slot's staging."""
        ...

    def delivery(self, slot: Slot, *, into: torch.Tensor | None = None) -> Delivery:
        """Begins copies to the device. into: the caller's tensor that they write, after its kernels."""
        ...


class HostCopies:
    """Between host tensors: every copy has ended when it returns."""

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As the Protocol says."""
        return torch.empty(shape, dtype=dtype)

    empty = staging

    def check_stream(self) -> None:
        """Does nothing: there is no stream."""

    def fetch(self, *pairs: Pair) -> Arrival:
        """As the Protocol says."""
        for target, source in pairs:
            target.copy_(source)
        return _ended

    def reuse(self, slot: Slot) -> None:
        """Nothing to wait for."""

    def delivery(self, slot: Slot, *, into: torch.Tensor | None = None) -> Delivery:
        """As the Protocol says."""
        return self

    def copy(self, out: torch.Tensor, staged: torch.Tensor) -> None:
        """As the Protocol says."""
        out.copy_(staged)

    def finish(self) -> None:
        """Does nothing: all copies have ended."""


def _ended() -> None:
    """The wait for copies that have ended."""


class CudaCopies:
    """Between a GPU and pinned memory.

    Args:
        timeout_ns: deadline of every wait for the GPU.
    """

    def __init__(self, device: torch.device, timeout_ns: int) -> None:
        self.device, self._timeout_ns = device, timeout_ns
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As the Protocol says; pinned."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def check_stream(self) -> None:
        """As the Protocol says."""
        refuse_capture()

    def fetch(self, *pairs: Pair) -> Arrival:
        """As the Protocol says."""
        stream = torch.cuda.current_stream(self.device)
        refuse_capture()
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
        event = stream.record_event()
        return lambda: self._wait(event, "tensors on their way to the host")

    def reuse(self, slot: Slot) -> None:
        """As the Protocol says."""
        if slot.ended is not None:
            self._wait(slot.ended, "an earlier copy to the device")
            slot.ended = None

    def delivery(self, slot: Slot, *, into: torch.Tensor | None = None) -> Delivery:
        """As the Protocol says."""
        refuse_capture()
        caller = torch.cuda.current_stream(self.device)
        if into is not None:
            self._stream.wait_stream(caller)
            into.record_stream(self._stream)
        return _CudaDelivery(self._stream, caller, slot)

    def _wait(self, event: torch.cuda.Event, what: str) -> None:
        deadline = time.monotonic_ns() + self._timeout_ns
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic_ns() > deadline:
                raise ExchangeError(
                    f"{self.device} has not finished {what} in {self._timeout_ns / 1e9:g} s:"
                    " the kernels before them on this stream hang, or need longer"
                )
            time.sleep(0)


class _CudaDelivery:
    """See Delivery."""

    def __init__(self, stream: torch.cuda.Stream, caller: torch.cuda.Stream, slot: Slot) -> None:
        self._stream, self._caller, self._slot = stream, caller, slot

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # Memory of the copies' own stream: kernels of the caller's stream may still read memory of theirs.
        with torch.cuda.stream(self._stream):
            made = torch.empty(shape, dtype=dtype, device=self._stream.device)
        made.record_stream(self._caller)
        return made

    def copy(self, out: torch.Tensor, staged: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            out.copy_(staged, non_blocking=True)

    def finish(self) -> None:
        self._slot.ended = self._stream.record_event()
        self._caller.wait_event(self._slot.ended)


def refuse_capture() -> None:
    """Raises InvalidArgument where the current stream of the current GPU is captured."""
    if torch.cuda.is_current_stream_capturing():
        raise InvalidArgument(
            "stream", "captured into a graph", "one that runs: the host takes part in each copy"
        )


def checked_device(device: torch.device | str | int) -> torch.device:
    """The device with its number. Raises ConfigError for another kind, StartupError for a missing device."""
    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise ConfigError("device", str(found), "cpu or cuda")
    if found.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise StartupError(f"{found}: no CUDA device is available")
    number = torch.cuda.current_device() if found.index is None else found.index
    if number >= torch.cuda.device_count():
        raise ConfigError("device", str(found), f"cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    return torch.device("cuda", number)


def copies_for(device: torch.device, timeout_ns: int) -> Copies:
    """The copies of a device that checked_device gave."""
    return HostCopies() if device.type == "cpu" else CudaCopies(device, timeout_ns)


# Of cuda.h.
_FLUSH_OPTIONS, _ORDERING = 117, 118  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_...
_OWNER = 100  # writes are seen by the device that owns the memory; the scope of a flush as well
_FLUSH_BY_HOST = 1


class Visible(Protocol):
    """Called after the host was notified of received rows, before kernels that read them are launched."""

    def flush(self) -> None:
        """Kernels launched from now on see them."""
        ...


class Ordered:
    """For devices whose kernels see them immediately."""

    def flush(self) -> None:
        """As the Protocol says."""


class Flushed:
    """For devices whose driver has to flush them."""

    def __init__(self, driver: ctypes.CDLL, device: torch.device) -> None:
        self._driver, self._device = driver, device

    def flush(self) -> None:
        """As the Protocol says; the host waits for the flush. Raises ExchangeError where it fails."""
        with torch.cuda.device(self._device):
            result = self._driver.cuFlushGPUDirectRDMAWrites(0, _OWNER)
        _check(result, "cuFlushGPUDirectRDMAWrites", ExchangeError)


def visible_on(device: torch.device) -> Visible:
    """For rows on this device. Raises StartupError where its driver can neither order nor flush writes."""
    if device.type != "cuda":
        return Ordered()
    torch.cuda.current_stream(device)  # loads the driver
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
