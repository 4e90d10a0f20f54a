"""What the driver says of the order of a card's writes, with a stand-in for it, as no card is at hand."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_server.errors import ExchangeError, StartupError
from ep_server.exchange.fabric import copies
from ep_server.exchange.fabric.copies import Flushed, Ordered, visible_on

GPU = torch.device("cuda:1")
ORDERED_FOR_OWNER, ORDERED_FOR_ALL, BY_HOST, BY_STREAM = 100, 200, 1, 2


class Driver:
    """libcuda's part in it. Attributes: what cuDeviceGetAttribute says of one device."""

    def __init__(self, ordering: int, flush_options: int, result: int = 0) -> None:
        self.attributes = {118: ordering, 117: flush_options}
        self.result, self.flushed = result, list[tuple[int, int]]()

    def cuDeviceGetAttribute(self, into: Any, name: int, device: int) -> int:
        assert device == GPU.index
        ctypes.cast(into, ctypes.POINTER(ctypes.c_int))[0] = self.attributes[name]
        return self.result

    def cuFlushGPUDirectRDMAWrites(self, target: int, scope: int) -> int:
        self.flushed.append((target, scope))
        return self.result


def asked(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> copies.Visible:
    monkeypatch.setattr(copies, "ctypes", SimpleNamespace(**vars(ctypes) | {"CDLL": lambda _: driver}))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    return visible_on(GPU)


@pytest.mark.parametrize("ordering", [ORDERED_FOR_OWNER, ORDERED_FOR_ALL])
def test_where_writes_are_ordered_nothing_is_flushed(ordering: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(ordering, BY_HOST)
    visible = asked(driver, monkeypatch)
    visible.flush()
    assert isinstance(visible, Ordered) and driver.flushed == []


def test_where_they_are_not_each_settling_flushes_for_the_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(0, BY_HOST | BY_STREAM)
    visible = asked(driver, monkeypatch)
    assert isinstance(visible, Flushed)
    visible.flush()
    assert driver.flushed == [(0, ORDERED_FOR_OWNER)]


def test_driver_without_ordering_or_flush_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match=r"cuda:1: .*neither orders nor flushes.*device_memory = host"):
        asked(Driver(0, BY_STREAM), monkeypatch)


def test_an_error_of_the_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match="cuDeviceGetAttribute: error 3 of the CUDA driver"):
        asked(Driver(0, 0, result=3), monkeypatch)


def test_a_flush_that_fails_is_an_error_of_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(0, BY_HOST)
    visible = asked(driver, monkeypatch)
    driver.result = 719
    with pytest.raises(ExchangeError, match="cuFlushGPUDirectRDMAWrites: error 719 of the CUDA driver"):
        visible.flush()
