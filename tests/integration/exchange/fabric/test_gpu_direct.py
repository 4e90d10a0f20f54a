"""The exchange whose rows lie on a device: the conformance suite, what providers hear, misuse, banks."""

from __future__ import annotations

import importlib
import signal
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_server.errors import ExchangeError, InvalidArgument
from ep_server.exchange.api import ExchangeSpec, Payload, Reduction, View
from ep_server.exchange.fabric.device import FabricDeviceExchange
from ep_server.exchange.fabric.device_rows import ALIGNMENT, DeviceRows, _aligned
from ep_server.exchange.fabric.link import FabricLink
from ep_server.exchange.fabric.settings import FabricOptions
from ep_server.exchange.faults import Action, Fault
from ep_server.exchange.hierarchical.exchange import HierarchicalExchange
from tests.support.exchange.conformance import run_cases, run_pair
from tests.support.exchange.process_group import run_group
from tests.support.exchange.ranks import run_outcomes
from tests.support.exchange.routing import make_inputs
from tests.support.exchange.sequences import run_sequences
from tests.support.fabric import direct_ends, hierarchical_ends
from tests.support.fabric.direct_ends import (
    CPU,
    GPU_3,
    DirectEnd,
    over_card,
    over_shm,
    own_name,
    poisoned_rows,
)
from tests.support.fabric.fabric_ends import needs
from tests.support.fabric.fault_programs import assert_lost, patiently
from tests.support.fabric.suites import failures


def whole_suite(group: dist.ProcessGroup, options: FabricOptions) -> dict[str, str]:
    factory = partial(direct_ends.make, options)
    return run_cases(group, factory) | run_sequences(group, factory)


# Between hosts, below, the system's runs it too.
@pytest.mark.parametrize(
    ("library", "num_ranks"), [pytest.param("system", 3, marks=pytest.mark.slow), ("wheel", 2)]
)
def test_conformance_over_a_device_memory_provider(library: str, num_ranks: int) -> None:
    assert not failures(run_group(whole_suite, num_ranks, args=(over_shm(library),), timeout=200))


@pytest.mark.parametrize(
    ("library", "disorder"), [("system", 7), pytest.param("wheel", 0, marks=pytest.mark.slow)]
)
def test_conformance_with_memory_registered_as_for_nics(library: str, disorder: int, tmp_path: Path) -> None:
    options = over_card(tmp_path, library, disorder)
    assert not failures(run_group(whole_suite, 2, args=(options,), timeout=200))


def beside_shared_memory(
    options: FabricOptions, hosts: tuple[int, ...], spec: ExchangeSpec, group: dist.ProcessGroup
) -> HierarchicalExchange:
    return hierarchical_ends.beside(direct_ends.make(options, spec, group), hosts)


def hierarchical_suite(group: dist.ProcessGroup, options: FabricOptions) -> dict[str, str]:
    factory = partial(beside_shared_memory, options, (0, 0, 1))
    return run_cases(group, factory) | run_sequences(group, factory)


def test_conformance_between_hosts_with_shared_memory() -> None:
    assert not failures(run_group(hierarchical_suite, 3, args=(over_shm(),), timeout=200))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("program", ["whole_suite", "in_flight", "refused"])
def test_on_a_gpu_behind_slow_kernels(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """shm copies through memory of its own then: what it does with CMA is not for GPU memory."""
    needs("cuda")
    monkeypatch.setenv("FI_SHM_DISABLE_CMA", "1")
    run = getattr(importlib.import_module("tests.support.fabric.gpu_direct"), program)
    results = run_group(run, 2, args=(over_shm("cuda"),), timeout=390)
    assert program != "whole_suite" or not failures(results)


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_a_killed_rank_is_named_by_every_survivor(op: str, tmp_path: Path) -> None:
    kill = Fault(rank=1, op=op, phase="send_rows", action=Action.KILL, epoch=3)

    def attempt(folder: Path, timeout_ns: int) -> None:
        ends = [DirectEnd(str(folder / "meeting"), over_shm())] * 3
        spec = {"placement": (0, 1, 2), "max_tokens": 4, "hidden": 64, "top_k": 3, "timeout_ns": timeout_ns}
        try:
            ended = run_outcomes(with_fault, 3, spec, 60, args=(kill,), ends=ends)
        finally:
            direct_ends.forget_the_dead()
        assert_lost([ended[0], ended[2]], 1)
        assert ended[1].exitcode == -signal.SIGKILL

    patiently(attempt, tmp_path)


def with_fault(exchange: FabricDeviceExchange, fault: Fault) -> None:
    exchange.barrier()  # ranks that started late are waited for before any deadline counts
    exchange.inner.group.set_faults((fault,))
    x = torch.full((4, 64), float(exchange.spec.rank + 1), dtype=torch.bfloat16)
    for _ in range(12):
        received = exchange.dispatch_send(x, torch.arange(3).repeat(4, 1), torch.ones(4, 3)).recv()
        assert torch.equal(exchange.combine_send(received.rows, received).recv(), 3 * x)


# -- what the provider is told ---------------------------------------------------------------------------


def one_pair(group: dist.ProcessGroup, options: FabricOptions) -> tuple[str, str, list[tuple[int, int]]]:
    """Kind and number in the card's own words, description, where device memory is."""
    spec = ExchangeSpec(group.rank(), group.size(), (0, 1), max_tokens=8, hidden=128, top_k=2)
    exchange = direct_ends.make(options, spec, group)
    run_pair(exchange, "uniform", 1, View.COMPACT)
    both = (exchange.staging.rows.inbound, exchange.staging.rows.outbound)
    exchange.barrier()
    described = exchange.inner.group.link.description
    exchange.close()
    return described, repr(exchange), [(each.data_ptr(), len(each)) for each in both]


def test_provider_registers_device_memory_and_sends_from_it(tmp_path: Path) -> None:
    by_rank = run_group(one_pair, 2, args=(over_card(tmp_path),), timeout=60)
    record = (tmp_path / "record").read_text(encoding="utf-8").splitlines()
    told = [line.split() for line in record]
    assert ["hint", "hmem_mr_mode=1"] in told
    registered: dict[str, list[tuple[int, int]]] = {}
    for _, process, kind, number, begin, size in (line for line in told if line[0] == "device"):
        assert (int(kind), int(number)) == (DeviceRows.CUDA, GPU_3)
        registered.setdefault(process, []).append((int(begin), int(size)))
    assert sorted(registered.values()) == sorted(memory for _, _, memory in by_rank)
    sent: dict[str, set[int]] = {process: set() for process in registered}
    for _, process, address in (line for line in told if line[0] == "device_write"):
        begins = [
            i for i, (begin, size) in enumerate(registered[process]) if 0 <= int(address) - begin < size
        ]
        sent[process].update(begins)
    # Rows that are dispatched leave from where the rank's own arrive, answers from the other memory.
    assert all(both == {0, 1} for both in sent.values())
    assert all("device memory" in description for description, _, _ in by_rank)


# -- misuse, banks ---------------------------------------------------------------------------------------


def alone(**changes: Any) -> FabricDeviceExchange:
    spec = ExchangeSpec(0, 1, (0, 0), max_tokens=4, hidden=64, top_k=2, **changes)
    rows = poisoned_rows(spec, DeviceRows.HOST, 0)
    link = FabricLink(spec, own_name(over_shm()), rows=rows)
    inner = link.exchange()
    link.connect([link.address], 1)
    return FabricDeviceExchange(inner, rows.inbound.device, rows)


def test_the_halves_of_the_host_refuse_rows() -> None:
    exchange = alone()
    mine = make_inputs(exchange.spec, "uniform", 1)[0]
    with pytest.raises(InvalidArgument, match=r"x .*host memory.*on the device"):
        exchange.inner.dispatch_send(mine.x, mine.ids, mine.weights)
    pending = exchange.begin_dispatch(mine.x, mine.ids, mine.weights).send()
    with pytest.raises(InvalidArgument, match=r"rows .*on the device"):
        pending.recv(View.COMPACT)
    exchange.close()


def test_reduction_without_slots_is_refused_before_any_write() -> None:
    exchange = alone(reduction=Reduction.RANK)
    mine = make_inputs(exchange.spec, "max_tokens", 1)[0]
    received = exchange.dispatch_send(mine.x, mine.ids, mine.weights).recv()
    with pytest.raises(InvalidArgument, match=r"^reduction = 'source': must be rank"):
        exchange.combine_send(received.rows, received, reduction=Reduction.SOURCE)
    exchange.combine_send(received.rows, received).recv()
    exchange.close()


class Reading:
    """Copies of the host, by which each wait for the device is noted."""

    def __init__(self, exchange: FabricDeviceExchange, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits, self._begin = 0, exchange._copies.fetch
        monkeypatch.setattr(exchange._copies, "fetch", self.fetch, raising=False)

    def fetch(self, *pairs: tuple[torch.Tensor, torch.Tensor]) -> Any:
        arrived = self._begin(*pairs)

        def wait() -> None:
            self.waits += 1
            arrived()

        return wait


def test_bank_is_returned_with_the_send_after_device_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exchange = alone(payload=Payload.BF16)
    reading = Reading(exchange, monkeypatch)
    mine = make_inputs(exchange.spec, "uniform", 1)[0]
    given = (mine.x, mine.ids, mine.weights)
    for _ in range(3 * exchange.spec.num_banks):
        pending = exchange.dispatch_send(*given)
        before = reading.waits
        pending.recv()
        assert reading.waits == before and len(exchange.staging._held) == 1  # the device may still read
    exchange.dispatch_send(*given)
    assert reading.waits == before + 2 and not exchange.staging._held
    exchange.close()


def test_a_reset_forgets_what_was_held() -> None:
    exchange = alone()
    mine = make_inputs(exchange.spec, "uniform", 1)[0]
    exchange.dispatch_send(mine.x, mine.ids, mine.weights).recv()
    exchange.inner.group.reset()
    run_pair(exchange, "uniform", 2, View.PADDED)
    exchange.close()


# -- ends ------------------------------------------------------------------------------------------------


def test_a_device_that_hangs_does_not_keep_the_network_open(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = alone()

    def hangs(slot: object) -> None:
        raise ExchangeError("has not finished")

    monkeypatch.setattr(exchange._copies, "reuse", hangs, raising=False)
    with pytest.raises(ExchangeError, match="has not finished"):
        exchange.close()
    with pytest.raises(InvalidArgument, match="exchange = 'closed'"):
        exchange.barrier()


def test_dropped_exchange_unregisters_before_memory_is_freed() -> None:
    exchange = alone()
    ended: list[str] = []
    for name, each in (
        ("port", exchange.inner.group.link._port),
        ("exchange", exchange.inner.group.native),
        ("memory", exchange.staging.rows.inbound),
    ):
        weakref.finalize(each, ended.append, name)
    del each, exchange
    assert ended[-1] == "memory" and sorted(ended[:2]) == ["exchange", "port"]


@pytest.mark.parametrize("size", [1, ALIGNMENT, ALIGNMENT + 1])
def test_pages_that_cards_write_hold_nothing_else(size: int) -> None:
    made = _aligned(size, CPU)
    storage = made.untyped_storage()
    begin, end = made.data_ptr(), made.data_ptr() + -(-size // ALIGNMENT) * ALIGNMENT
    assert begin % ALIGNMENT == 0 and len(made) == size
    assert storage.data_ptr() <= begin and end <= storage.data_ptr() + storage.nbytes()
