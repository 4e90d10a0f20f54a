"""Which way rows of a device take to the network: what is asked for, what providers have, what is refused."""

from __future__ import annotations

import errno
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_server.errors import ConfigError, EpServerError, ExchangeError, InvalidArgument, StartupError
from ep_server.exchange.api import ExchangeSpec, View
from ep_server.exchange.fabric import bootstrap as fabric_bootstrap
from ep_server.exchange.fabric import device_memory, host_staging
from ep_server.exchange.fabric.copies import Arrival, HostCopies, Pair
from ep_server.exchange.fabric.device_memory import DeviceMemory
from ep_server.exchange.fabric.device_rows import DeviceRows
from ep_server.exchange.fabric.exchange import FabricExchange, FabricOptions
from ep_server.exchange.fabric.gpu_direct import GpuDirect, RowsFabric
from ep_server.exchange.fabric.host_staging import HostStaging
from tests.support.exchange.conformance import run_pair
from tests.support.exchange.process_group import run_group
from tests.support.fabric.direct_ends import CPU, over_card, over_shm, own_name, poisoned_rows
from tests.support.fabric.fabric_ends import loopback, needs

SPEC = ExchangeSpec(0, 1, (0, 0), max_tokens=4, hidden=64, top_k=2)


def choose(options: FabricOptions, wanted: DeviceMemory | str, device: str = "cpu") -> FabricExchange:
    made = partial(FabricExchange, SPEC, options)
    return device_memory.open_end(SPEC, torch.device(device), wanted, options, None, made)


@pytest.mark.parametrize("wanted", [DeviceMemory.AUTO, DeviceMemory.HOST, "host"])
def test_tensors_of_the_host_stay_there_unless_asked(wanted: DeviceMemory | str) -> None:
    needs("system")
    inner = choose(loopback(), wanted)
    exchange = device_memory.on_device(inner, CPU)
    assert type(inner) is FabricExchange and type(exchange.staging) is HostStaging
    exchange.close()


def test_a_device_that_hangs_does_not_keep_the_network_open(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("system")
    exchange = device_memory.on_device(choose(loopback(), DeviceMemory.HOST), CPU)

    def hangs() -> None:
        raise ExchangeError("has not finished")

    monkeypatch.setattr(exchange.staging, "drain", hangs)
    with pytest.raises(ExchangeError, match="has not finished"):
        exchange.close()
    with pytest.raises(InvalidArgument, match="exchange = 'closed'"):
        exchange.barrier()


@pytest.mark.parametrize("wanted", [DeviceMemory.HMEM, "hmem"])
def test_what_is_asked_for_is_taken_where_it_can_be(wanted: DeviceMemory | str) -> None:
    inner = choose(own_name(over_shm()), wanted)
    exchange = device_memory.on_device(inner, CPU)
    assert isinstance(exchange.staging, GpuDirect)
    assert exchange.memory_bytes == exchange.staging.rows.bytes > 0
    exchange.close()


def all_ask(group: dist.ProcessGroup, options: FabricOptions) -> str:
    spec = ExchangeSpec(group.rank(), group.size(), (0, 1), max_tokens=8, hidden=128, top_k=2)
    exchange = device_memory.from_process_group(group, spec, "cpu", own_name(options), "hmem")
    run_pair(exchange, "uniform", 1, View.COMPACT)
    exchange.barrier()
    exchange.close()
    return type(exchange.staging).__name__


def test_all_ranks_that_ask_for_it_get_it() -> None:
    assert run_group(all_ask, 2, args=(over_shm(),), timeout=60) == ["GpuDirect"] * 2


def test_missing_capability_names_provider_and_capability() -> None:
    needs("system")
    with pytest.raises(StartupError, match=r"tcp;ofi_rxm .*: reaches no memory of devices \(FI_HMEM\)"):
        choose(loopback(provider="tcp;ofi_rxm"), DeviceMemory.HMEM)


def test_failed_registration_says_what_is_missing(tmp_path: Path) -> None:
    options = over_card(tmp_path, refused=True)
    with pytest.raises(StartupError, match=r"provider verbs;ofi_rxm.*device 3 \(FI_HMEM needs .*dma-buf"):
        RowsFabric(SPEC, poisoned_rows(SPEC), options)


@pytest.mark.parametrize("library", ["system", "wheel"])
def test_a_libfabric_without_the_devices_kind_refuses_its_memory(library: str) -> None:
    options = own_name(over_shm(library))
    with pytest.raises(StartupError, match=r"provider shm.* bytes of device 3 \(FI_HMEM needs"):
        RowsFabric(SPEC, poisoned_rows(SPEC), options)


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
    exchange = RowsFabric(SPEC, poisoned_rows(SPEC), over_card(tmp_path, **said))
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
        RowsFabric(SPEC, poisoned_rows(SPEC), options)


def test_provider_copies_are_not_checked_for_cpu_or_if_allowed(tmp_path: Path) -> None:
    options = over_card(tmp_path, **COPYING[1][0])
    for rows, asked in (
        (poisoned_rows(SPEC, DeviceRows.HOST, 0), options),
        (poisoned_rows(SPEC), replace(options, device_copies=True)),
    ):
        exchange = RowsFabric(SPEC, rows, asked)
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

    class Opened(RowsFabric):
        def __init__(self, *given: Any) -> None:
            happened.append("registered")
            super().__init__(*given)

    monkeypatch.setattr(device_memory, "visible_on", lambda device: None)
    monkeypatch.setattr(device_memory, "copies_for", lambda device, timeout_ns: Stream())
    monkeypatch.setattr(device_memory, "RowsFabric", Opened)
    monkeypatch.setattr(DeviceRows, "allocate", allocate)
    return happened


def test_auto_uses_host_memory_and_logs_it_even_with_gpu_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    happened = standing_in_for_a_gpu(monkeypatch)
    with caplog.at_level(logging.INFO, "ep_server"):
        inner = choose(over_card(tmp_path), DeviceMemory.AUTO, "cuda:0")
    assert type(inner) is FabricExchange and happened == []
    inner.close()
    assert any("through host memory: exchange.device_memory = auto" in line for line in caplog.messages)


def test_cards_get_memory_that_no_earlier_kernel_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = standing_in_for_a_gpu(monkeypatch)
    choose(over_card(tmp_path), DeviceMemory.HMEM, "cuda:0").close()
    assert happened == ["allocated", "waited", "registered"]


def test_a_word_that_is_no_choice_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"^device_memory = 'gpu': must be one of auto, hmem, host$"):
        choose(loopback(), "gpu")


def one_of_each(group: dist.ProcessGroup, options: FabricOptions) -> str:
    spec = ExchangeSpec(group.rank(), group.size(), (0, 1), max_tokens=4, hidden=64, top_k=2)
    mine = own_name(options)

    def make() -> FabricExchange:
        plain = group.rank() == 1
        return FabricExchange(spec, mine) if plain else RowsFabric(spec, DeviceRows.allocate(spec, CPU), mine)

    with pytest.raises(StartupError) as caught:
        fabric_bootstrap.from_process_group(group, spec, mine, make=make)
    return str(caught.value)


def test_ranks_that_choose_differently_are_told_so() -> None:
    first, second = run_group(one_of_each, 2, args=(over_shm(),), timeout=60)
    assert "rank 1 has rows of 0 bytes on a device, rank 0 of" in first
    assert "exchange.device_memory" in first and "exchange.device_memory" in second


def without_staging(group: dist.ProcessGroup) -> str:
    """Rank 1 has none."""
    spec = ExchangeSpec(group.rank(), group.size(), (0, 1), max_tokens=4, hidden=64, top_k=2)

    def none(*_: object) -> Any:
        raise StartupError("no memory can be pinned")

    if group.rank() == 1:
        vars(host_staging).update(Buffers=none)
    with pytest.raises(EpServerError) as caught:
        device_memory.from_process_group(group, spec, "cpu", loopback(), DeviceMemory.HOST)
    return str(caught.value)


def test_a_rank_without_its_memory_is_an_error_on_every_rank() -> None:
    needs("system")
    first, second = run_group(without_staging, 2, timeout=60)
    assert "abort" in first and second == "no memory can be pinned"
