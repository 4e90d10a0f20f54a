"""Ranks of several hosts, two parts of an exchange each, when one is killed or withholds something."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_server.errors import GroupAborted, PeerLost, PeerTimeout
from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.fabric.device import FabricDeviceExchange
from ep_server.exchange.fabric.settings import FabricOptions
from ep_server.exchange.faults import Action, Fault
from ep_server.exchange.hierarchical.exchange import HierarchicalExchange
from ep_server.testing import namespaces
from ep_server.testing.namespaces import Hosts
from tests.support.exchange.ranks import Outcome, Peer, Ranks, run_outcomes, run_ranks
from tests.support.fabric import hierarchical_ends
from tests.support.fabric.fabric_ends import loopback, needs
from tests.support.fabric.fault_programs import assert_lost, assert_only, patiently
from tests.support.fabric.mixed_ends import MixedEnd, mixed_ends

HOSTS = (0, 0, 1, 1)
TOKENS, HIDDEN = 4, 64
SPEC = {"placement": (0, 1, 2, 3), "max_tokens": TOKENS, "hidden": HIDDEN, "top_k": 4}


@dataclass(frozen=True)
class HierarchicalEnd:
    """One rank's: over libfabric between hosts, in shared memory inside."""

    inner: MixedEnd

    def open(self, spec: ExchangeSpec, **waiting: Any) -> HierarchicalExchange:
        hosts = self.inner.share.hosts
        return hierarchical_ends.beside(FabricDeviceExchange(self.inner.open(spec, **waiting), "cpu"), hosts)


def faulty(exchange: HierarchicalExchange, victim: int, intra: bool, fault: Fault) -> None:
    """intra: the fault is in the part inside the victim's host."""
    exchange.barrier()  # ranks that started late are waited for before any deadline counts
    if exchange.spec.rank == victim:
        part = exchange.intra if intra else exchange.inter.inner
        part.group.set_faults((fault,))  # type: ignore[union-attr]
    operations(exchange, 12)


def operations(exchange: HierarchicalExchange, count: int) -> None:
    """Every token goes everywhere."""
    x = torch.full((TOKENS, HIDDEN), float(exchange.spec.rank + 1), dtype=torch.bfloat16)
    for _ in range(count):
        received = exchange.dispatch_send(x, torch.arange(4).repeat(TOKENS, 1), torch.ones(TOKENS, 4)).recv()
        assert torch.equal(exchange.combine_send(received.rows, received).recv(), 4 * x)


def run(folder: Path, timeout_ns: int, victim: int, intra: bool, fault: Fault) -> list[Outcome]:
    needs("system")
    spec = SPEC | {"timeout_ns": timeout_ns}
    with mixed_ends(folder, HOSTS, spec, loopback()) as ends:
        each = [HierarchicalEnd(end) for end in ends]
        return run_outcomes(faulty, 4, spec, 60, args=(victim, intra, fault), ends=each)


@pytest.mark.parametrize(
    ("victim", "intra", "op"),
    [
        (3, True, "dispatch"),
        (1, False, "combine"),
        pytest.param(3, True, "combine", marks=pytest.mark.slow),
        pytest.param(1, False, "dispatch", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_is_named_by_every_survivor(victim: int, intra: bool, op: str, tmp_path: Path) -> None:
    """Whichever part it died in: its last send to anybody names it as it is numbered in the whole group."""
    place = victim % 2 if intra else victim
    kill = Fault(rank=place, op=op, phase="send_rows", action=Action.KILL, epoch=3)

    def attempt(folder: Path, timeout_ns: int) -> None:
        ended = run(folder, timeout_ns, victim, intra, kill)
        assert_lost([outcome for outcome in ended if outcome.rank != victim], victim)
        assert ended[victim].exitcode == -signal.SIGKILL

    patiently(attempt, tmp_path)


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_intra_host_faults_use_group_rank_numbers(op: str, tmp_path: Path) -> None:
    drop = Fault(rank=1, op=op, phase="send_header", action=Action.DROP, epoch=2, peer=0)

    def attempt(folder: Path, timeout_ns: int) -> None:
        ended = run(folder, timeout_ns, 3, True, drop)
        assert_only([3], [ended[2]])
        error = ended[2].error
        assert isinstance(error, PeerTimeout), ended[2].trace
        assert (error.op, error.phase, error.rank, error.peer) == (op, "recv_header", 2, 3)
        assert all(outcome.error is not None for outcome in ended), "somebody went on"

    patiently(attempt, tmp_path)


def test_two_namespaces_exchange_and_name_a_disconnected_host(tmp_path: Path) -> None:
    """Whoever is left in the other namespace names a rank of the one that fell silent."""
    needs("system")
    if why := namespaces.missing():
        pytest.skip(why)
    options = FabricOptions(domain=namespaces.DEVICE)

    def attempt(folder: Path, timeout_ns: int) -> None:
        spec = SPEC | {"timeout_ns": timeout_ns}
        with (
            Hosts(2) as hosts,
            mixed_ends(folder, HOSTS, spec, options, tuple(hosts.names)) as ends,
            Ranks(cut_off, 4, spec, ends=[HierarchicalEnd(end) for end in ends]) as ranks,
        ):
            for rank in range(4):
                assert ranks.message(rank, 30) == "started"
            hosts.cut(1)
            ended = ranks.join(30)
        assert_only([2, 3], ended[:2])
        assert_only([0, 1], ended[2:])
        for outcome in ended:
            assert isinstance(outcome.error, PeerTimeout | PeerLost), outcome

    patiently(attempt, tmp_path)


def cut_off(exchange: HierarchicalExchange, peer: Peer) -> None:
    exchange.barrier()  # as above
    operations(exchange, 12)
    peer.tell("started")
    while True:
        operations(exchange, 1)


def aborted(exchange: HierarchicalExchange) -> str:
    exchange.intra.group.abort()  # type: ignore[attr-defined]
    x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16)
    try:
        exchange.dispatch_send(x, torch.arange(4).repeat(TOKENS, 1), torch.ones(TOKENS, 4)).recv()
    except GroupAborted as error:
        return str(error)
    return "went on"


def test_an_abort_inside_a_host_says_whose_numbers_it_tells(tmp_path: Path) -> None:
    needs("system")
    with mixed_ends(tmp_path, HOSTS, SPEC, loopback()) as ends:
        ended = run_outcomes(aborted, 4, SPEC, 30, ends=[HierarchicalEnd(end) for end in ends])
    for outcome in ended:
        first = 2 * HOSTS[outcome.rank]
        assert outcome.value.startswith(f"among ranks {first} to {first + 1}, counted from 0 there: ")


def lost(exchange: HierarchicalExchange, dead: int) -> tuple[list[int], list[int]]:
    """Its other ranks go on without one: masked at first, then in a new generation."""
    membership, rank = exchange.membership, exchange.spec.rank
    assert membership is not None and membership.live == set(range(4))
    operations(exchange, 2)
    exchange.barrier()
    if rank == dead:
        return [], []
    membership.mask([dead])
    found = [partial_sums(exchange) for _ in range(6)]
    masked = sorted(membership.masked)
    membership.reset([dead])
    found += [partial_sums(exchange) for _ in range(6)]
    assert found == [3.0 * (rank + 1)] * 12  # every token loses the output of one expert
    return masked, sorted(membership.live)


def partial_sums(exchange: HierarchicalExchange) -> float:
    x = torch.full((TOKENS, HIDDEN), float(exchange.spec.rank + 1), dtype=torch.bfloat16)
    received = exchange.dispatch_send(x, torch.arange(4).repeat(TOKENS, 1), torch.ones(TOKENS, 4)).recv()
    (value,) = exchange.combine_send(received.rows, received).recv().unique().tolist()
    return float(value)


@pytest.mark.parametrize("dead", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_of_both_hosts_go_on_without_a_masked_one(dead: int, tmp_path: Path) -> None:
    needs("system")
    with mixed_ends(tmp_path, HOSTS, SPEC, loopback()) as ends:
        found = run_ranks(lost, 4, SPEC, 30, args=(dead,), ends=[HierarchicalEnd(end) for end in ends])
    live = [rank for rank in range(4) if rank != dead]
    assert [found[rank] for rank in live] == [([dead], live)] * 3
