"""Which way rows of a device take to the network: what is asked for, what providers have, what is refused."""

from __future__ import annotations

import errno
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_server.errors import ConfigError, ExchangeError, InvalidArgument, StartupError
from ep_server.exchange.api import ExchangeSpec, View
from ep_server.exchange.fabric import gpu_direct, host_staging
from ep_server.exchange.fabric.copies import Arrival, HostCopies, Pair
from ep_server.exchange.fabric.device import FabricDeviceExchange
from ep_server.exchange.fabric.device_rows import DeviceRows
from ep_server.exchange.fabric.gpu_direct import GpuDirect, rows_on_device
from ep_server.exchange.fabric.host_staging import HostStaging
from ep_server.exchange.fabric.link import FabricLink
from ep_server.exchange.fabric.settings import FabricOptions
from tests.support.exchange.conformance import run_pair
from tests.support.exchange.process_group import run_group
from tests.support.fabric.direct_ends import CPU, over_card, over_shm, own_name, poisoned_rows
from tests.support.fabric.fabric_ends import connected, loopback, needs, through_group

SPEC = ExchangeSpec(0, 1, (0, 0), max_tokens=4, hidden=64, top_k=2)


def alone(options: FabricOptions, wanted: str, device: str = "cpu") -> FabricDeviceExchange:
    """The staging that is asked for, on an end that is not connected."""
    rows = rows_on_device(wanted, SPEC, torch.device(device), options)
    inner = FabricLink(SPEC, options, rows=rows).exchange()
    return FabricDeviceExchange(inner, CPU, rows)


@pytest.mark.parametrize("wanted", ["auto", "host"])
def test_tensors_of_the_host_stay_there_unless_asked(wanted: str) -> None:
    needs("system")
    exchange = alone(loopback(), wanted)
    assert type(exchange.staging) is HostStaging
    exchange.close()


def test_a_device_that_hangs_does_not_keep_the_network_open(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("system")
    exchange = alone(loopback(), "host")

    def hangs() -> None:
        raise ExchangeError("has not finished")

    monkeypatch.setattr(exchange.staging, "drain", hangs)
    with pytest.raises(ExchangeError, match="has not finished"):
        exchange.close()
    with pytest.raises(InvalidArgument, match="exchange = 'closed'"):
        exchange.barrier()


def test_what_is_asked_for_is_taken_where_it_can_be() -> None:
    exchange = alone(own_name(over_shm()), "hmem")
    assert isinstance(exchange.staging, GpuDirect)
    assert exchange.capabilities.memory_bytes == exchange.staging.rows.bytes > 0
    exchange.close()


def opened(
    group: dist.ProcessGroup, spec: ExchangeSpec, options: FabricOptions, wanted: str
) -> FabricDeviceExchange:
    rows = rows_on_device(wanted, spec, CPU, options)
    inner = connected(FabricLink(spec, options, rows=rows), through_group(group))
    return FabricDeviceExchange(inner, CPU, rows)


def all_ask(group: dist.ProcessGroup, options: FabricOptions) -> str:
    spec = ExchangeSpec(group.rank(), group.size(), (0, 1), max_tokens=8, hidden=128, top_k=2)
    exchange = opened(group, spec, own_name(options), "hmem")
    run_pair(exchange, "uniform", 1, View.COMPACT)
    exchange.barrier()
    exchange.close()
    return type(exchange.staging).__name__


def test_all_ranks_that_ask_for_it_get_it() -> None:
    assert run_group(all_ask, 2, args=(over_shm(),), timeout=60) == ["GpuDirect"] * 2


def test_missing_capability_names_provider_and_capability() -> None:
    needs("system")
    with pytest.raises(StartupError, match=r"tcp;ofi_rxm .*: reaches no memory of devices \(FI_HMEM\)"):
        alone(loopback(provider="tcp;ofi_rxm"), "hmem")


def test_failed_registration_says_what_is_missing(tmp_path: Path) -> None:
    options = over_card(tmp_path, refused=True)
    with pytest.raises(StartupError, match=r"provider verbs;ofi_rxm.*device 3 \(FI_HMEM needs .*dma-buf"):
        FabricLink(SPEC, options, rows=poisoned_rows(SPEC))


@pytest.mark.parametrize("library", ["system", "wheel"])
def test_a_libfabric_without_the_devices_kind_refuses_its_memory(library: str) -> None:
    options = own_name(over_shm(library))
    with pytest.raises(StartupError, match=r"provider shm.* bytes of device 3 \(FI_HMEM needs"):
        FabricLink(SPEC, options, rows=poisoned_rows(SPEC))


@pytest.mark.parametrize(
    "said",
    [
        {"name": "efa", "emulated": 0, "p2p": 0},
        {"name": "cxi", "cuda_calls": 0},
        {"name": "verbs;ofi_rxm", "cuda_calls": errno.EOPNOTSUPP},  # the layer's answer, not that of verbs
    ],
    ids=lambda said: said["name"],
)
def test_a_provider_that_cannot_copy_a_gpus_rows_is_taken(said: dict[str, Any], tmp_path: Path) -> None:
    exchange = FabricLink(SPEC, over_card(tmp_path, **said), rows=poisoned_rows(SPEC))
    assert exchange.description.endswith(", peer to peer")
    exchange.close()


COPYING = [
    ({"name": "efa", "emulated": 0, "p2p": errno.EOPNOTSUPP, "cuda_calls": 0}, "peer to peer .*P2P.: .*-95"),
    ({"name": "cxi", "cuda_calls": errno.EOPNOTSUPP}, "without copies .*CUDA_API_PERMITTED.*-95"),
    ({"name": "cxi"}, r"without copies .*needs libfabric 1\.18"),
]


@pytest.mark.parametrize(("said", "error"), COPYING)
def test_provider_that_may_copy_gpu_rows_is_refused(said: dict[str, Any], error: str, tmp_path: Path) -> None:
    options = over_card(tmp_path, **said)
    with pytest.raises(StartupError, match=f"provider {said['name']}, .*{error}"):
        FabricLink(SPEC, options, rows=poisoned_rows(SPEC))


def test_provider_copies_are_not_checked_for_cpu_or_if_allowed(tmp_path: Path) -> None:
    options = over_card(tmp_path, **COPYING[1][0])
    for rows, asked in (
        (poisoned_rows(SPEC, DeviceRows.HOST, 0), options),
        (poisoned_rows(SPEC), replace(options, device_copies=True)),
    ):
        exchange = FabricLink(SPEC, asked, rows=rows)
        assert "peer to peer" not in exchange.description
        exchange.close()


def standing_in_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Host memory for a GPU's. Returns what happens to it."""
    rows, happened = poisoned_rows(SPEC), list[str]()

    def allocate(spec: ExchangeSpec, device: torch.device) -> DeviceRows:
        happened.append("allocated")
        return rows

    class Stream(HostCopies):
        def fetch(self, *pairs: Pair) -> Arrival:
            return lambda: happened.append("waited")

    monkeypatch.setattr(gpu_direct, "visible_on", lambda device: None)
    monkeypatch.setattr(gpu_direct, "copies_for", lambda device, timeout_ns: Stream())
    monkeypatch.setattr(DeviceRows, "allocate", allocate)
    return happened


def test_auto_uses_host_memory_and_logs_it_even_with_gpu_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    happened = standing_in_for_a_gpu(monkeypatch)
    with caplog.at_level(logging.INFO, "ep_server"):
        rows = rows_on_device("auto", SPEC, torch.device("cuda:0"), over_card(tmp_path))
    assert rows is None and happened == []
    assert any("through host memory: exchange.device_memory = auto" in line for line in caplog.messages)


def test_cards_get_memory_that_no_earlier_kernel_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = standing_in_for_a_gpu(monkeypatch)
    assert rows_on_device("hmem", SPEC, torch.device("cuda:0"), over_card(tmp_path)) is not None
    assert happened == ["allocated", "waited"]


def test_a_word_that_is_no_choice_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"^device_memory = 'gpu': must be one of auto, hmem, host$"):
        rows_on_device("gpu", SPEC, CPU, loopback())


def one_of_each(group: dist.ProcessGroup, options: FabricOptions) -> str:
    spec = ExchangeSpec(group.rank(), group.size(), (0, 1), max_tokens=4, hidden=64, top_k=2)
    with pytest.raises(StartupError) as caught:
        opened(group, spec, own_name(options), "host" if group.rank() == 1 else "hmem")
    return str(caught.value)


def test_ranks_that_choose_differently_are_told_so() -> None:
    first, second = run_group(one_of_each, 2, args=(over_shm(),), timeout=60)
    assert "rank 1 has rows of 0 bytes on a device, rank 0 of" in first
    assert "exchange.device_memory" in first and "exchange.device_memory" in second


def test_exchange_without_its_staging_ends_the_waits_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("system")
    inner, aborted = FabricLink(SPEC, loopback()).exchange(), []

    def none(*_: object) -> Any:
        raise StartupError("no memory can be pinned")

    monkeypatch.setattr(host_staging, "RecvStaging", none)
    monkeypatch.setattr(inner.group, "abort", lambda: aborted.append(True))
    with pytest.raises(StartupError, match="no memory can be pinned"):
        FabricDeviceExchange(inner, CPU)
    assert aborted == [True]
    with pytest.raises(InvalidArgument, match="closed"):
        inner.barrier()
