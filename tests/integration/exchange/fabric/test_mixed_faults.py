"""What ranks of a mixed group do when one is late, stopped, dead or masked, or when a host is cut off."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_server.errors import GroupAborted, PeerLost, PeerTimeout
from ep_server.exchange.fabric.settings import FabricOptions
from ep_server.exchange.faults import Action, Fault
from ep_server.exchange.host import HostExchange
from ep_server.testing import namespaces
from ep_server.testing.namespaces import Hosts
from tests.support.exchange import fault_programs as programs
from tests.support.exchange.fault_programs import SECOND, operation, rows_of, spec_of
from tests.support.exchange.ranks import Peer, Ranks, run_outcomes, run_ranks
from tests.support.fabric.fabric_ends import loopback, needs
from tests.support.fabric.fault_programs import (
    AnotherLost,
    assert_lost,
    assert_only,
    goes_on,
    never_ends,
    patiently,
    resets,
)
from tests.support.fabric.mixed_ends import MixedEnd, mixed_ends

HOSTS = (0, 1, 1, 1)  # rank 1 takes in what rank 0 sends to its host; rank 0 what comes to its own
GATEWAY, BEHIND, ALONE = 1, 2, 0
TWO_BY_TWO = (0, 0, 1, 1)
SLOW = pytest.mark.slow


@contextlib.contextmanager
def group(
    folder: Path, timeout_ns: int = 10 * SECOND, hosts: tuple[int, ...] = HOSTS, **options: Any
) -> Iterator[tuple[dict[str, object], list[MixedEnd]]]:
    needs("system")
    spec = spec_of(len(hosts), timeout_ns)
    with mixed_ends(folder, hosts, spec, loopback(**options)) as ends:
        yield spec, ends


@pytest.mark.parametrize("victim", [GATEWAY, BEHIND, pytest.param(ALONE, marks=SLOW)])
@pytest.mark.parametrize("op", ["dispatch", pytest.param("combine", marks=SLOW)])
def test_a_killed_rank_is_named_by_every_survivor(victim: int, op: str, tmp_path: Path) -> None:
    kill = Fault(rank=victim, op=op, phase="send_rows", action=Action.KILL, epoch=3)

    def attempt(folder: Path, timeout_ns: int) -> None:
        with group(folder, timeout_ns) as (spec, ends):
            ended = run_outcomes(programs.operations, 4, spec, 60, args=((kill,), 20), ends=ends)
        assert_lost([o for o in ended if o.rank != victim], victim)
        assert ended[victim].exitcode == -signal.SIGKILL

    patiently(attempt, tmp_path)


def test_a_stopped_gateway_is_named_and_not_the_source_behind_it(tmp_path: Path) -> None:

    def attempt(folder: Path, timeout_ns: int) -> None:
        with group(folder, timeout_ns) as (spec, ends), Ranks(goes_on, 4, spec, ends=ends) as ranks:
            for rank in range(4):
                assert ranks.message(rank, 30) == "started"
            ranks.kill(GATEWAY, signal.SIGSTOP)
            time.sleep(2.5 * timeout_ns / SECOND)  # by then all have noticed
            ranks.kill(GATEWAY)
            ended = ranks.join(30)
        assert_lost([o for o in ended if o.rank != GATEWAY], GATEWAY)

    patiently(attempt, tmp_path)


def late_experts(exchange: HostExchange, peer: Peer) -> None:
    """The gateway computes; what it takes in for others meanwhile must not wait for it."""
    operation(exchange, 0)
    exchange.barrier()
    rank, tokens = exchange.spec.rank, 4
    if rank == ALONE:
        peer.hear()  # sends late: the gateway takes this in while it computes
    x = rows_of(rank, 1)
    pending = exchange.dispatch_send(x, torch.arange(3).repeat(tokens, 1), torch.ones(tokens, 3))
    if rank == GATEWAY:
        peer.hear()
    received = pending.recv()
    if rank == BEHIND:
        peer.tell("received")
    exchange.combine_send(received.rows, received).recv()


def test_a_gateway_that_computes_still_takes_in_rows_for_others(tmp_path: Path) -> None:
    with group(tmp_path, 20 * SECOND) as (spec, ends), Ranks(late_experts, 4, spec, ends=ends) as ranks:
        ranks.tell(ALONE, "send")
        assert ranks.message(BEHIND, 10) == "received"  # the gateway has not asked for its own rows yet
        ranks.tell(GATEWAY, "receive")
        assert [o.error for o in ranks.join(30)] == [None] * 4


@SLOW
def test_a_barrier_ends_when_the_heartbeat_of_a_peer_has_ended(tmp_path: Path) -> None:
    options = {"liveness_seconds": 1.0}
    with group(tmp_path, 60 * SECOND) as (spec, ends):
        ended = run_outcomes(programs.dies_in_barrier, 4, spec, 30, exchange_kwargs=options, ends=ends)
    assert_lost([o for o in ended if o.rank != 1], 1)


@pytest.mark.parametrize("victim", [GATEWAY, *[pytest.param(rank, marks=SLOW) for rank in (BEHIND, ALONE)]])
def test_masking_goes_on_without_a_killed_rank(victim: int, tmp_path: Path) -> None:
    kill = Fault(rank=victim, op="dispatch", phase="send_rows", action=Action.KILL, epoch=3)
    options = {"on_timeout": "mask"}

    def attempt(folder: Path, timeout_ns: int) -> None:
        with group(folder, timeout_ns) as (spec, ends):
            ended = run_outcomes(
                goes_on_masked, 4, spec, 60, args=((kill,), 20), exchange_kwargs=options, ends=ends
            )
        survivors = [o for o in ended if o.rank != victim]
        if any(isinstance(o.error, AnotherMasked) for o in survivors):
            raise AnotherLost(survivors)
        assert ended[victim].exitcode == -signal.SIGKILL
        for outcome in survivors:
            assert outcome.error is None, outcome.trace
            assert outcome.value == {victim}

    patiently(attempt, tmp_path, 0.5)


class AnotherMasked(Exception):
    """A rank other than the one that is killed."""


def goes_on_masked(exchange: HostExchange, faults: tuple[Fault, ...], count: int) -> frozenset[int]:
    """Rows of the operation in which a gateway dies may be lost; what comes is right, later all comes."""
    exchange.barrier()  # ranks that started late are waited for before any deadline counts
    exchange.group.set_faults(faults)
    for step in range(count):
        x, ids = rows_of(exchange.spec.rank, step), torch.arange(3).repeat(4, 1)
        received = exchange.dispatch_send(x, ids, torch.ones(4, 3)).recv()
        if exchange.group.masked - {faults[0].rank}:
            raise AnotherMasked(exchange.group.masked)
        sources = received.rows[:, 0].long()
        assert (received.rows[:, 2] == step).all()
        y = exchange.combine_send(received.rows, received).recv()
        if exchange.group.masked - {faults[0].rank}:
            raise AnotherMasked(exchange.group.masked)
        if step > 5:
            alive = [r for r in range(4) if r not in exchange.group.masked]
            assert sorted(set(sources.tolist())) == (alive if len(exchange.spec.local_experts) else [])
            answering = sum(exchange.spec.placement[e] not in exchange.group.masked for e in range(3))
            assert torch.equal(y, x * answering)
    return exchange.group.masked


def test_a_header_dropped_behind_a_gateway_names_its_source(tmp_path: Path) -> None:
    drop = Fault(rank=ALONE, op="dispatch", phase="send_header", action=Action.DROP, epoch=2, peer=BEHIND)

    def attempt(folder: Path, timeout_ns: int) -> None:
        # The others wait for this rank's answer: their deadlines are to pass after its own.
        late = tuple(
            Fault(rank, "combine", "recv_header", Action.DELAY, epoch=2, delay_ns=timeout_ns // 2)
            for rank in (ALONE, GATEWAY, 3)
        )
        with group(folder, timeout_ns) as (spec, ends):
            ended = run_outcomes(programs.operations, 4, spec, 60, args=((drop, *late), 8), ends=ends)
        assert_only([ALONE], ended)
        error = ended[BEHIND].error
        assert isinstance(error, PeerTimeout)
        assert (error.op, error.phase, error.peer, error.expected) == ("dispatch", "recv_header", ALONE, 2)
        assert isinstance(ended[ALONE].error, GroupAborted)
        for rank in (GATEWAY, 3):
            assert isinstance(ended[rank].error, PeerLost)

    patiently(attempt, tmp_path)


def test_an_abort_ends_all_waits_until_the_group_is_reset(tmp_path: Path) -> None:
    with group(tmp_path) as (spec, ends):
        assert run_ranks(programs.aborts_and_resets, 4, spec, 30, ends=ends) == [1] * 4


@pytest.mark.parametrize("seed", [pytest.param(0, marks=SLOW), 11])
def test_a_reset_leaves_nothing_of_the_old_generation(seed: int, tmp_path: Path) -> None:
    with group(tmp_path, disorder=seed) as (spec, ends):
        assert run_ranks(resets, 4, spec, 60, args=(12,), ends=ends) == [12] * 4


@SLOW
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_every_survivor_names_a_rank_killed_at_random(how: signal.Signals, tmp_path: Path) -> None:
    moments = random.Random(int(how))
    for turn in range(24):
        folder, victim = tmp_path / str(turn), (turn + 1) % 4
        folder.mkdir()
        hosts = (HOSTS, TWO_BY_TWO)[turn % 2]
        with (
            group(folder, SECOND, hosts) as (spec, ends),
            Ranks(never_ends, 4, spec, ends=ends) as ranks,
        ):
            for rank in range(4):
                assert ranks.message(rank, 30) == "started"
            time.sleep(moments.uniform(0.0, 0.3))  # not a synchronisation: the random moment
            ranks.kill(victim, how)
            if how == signal.SIGSTOP:
                time.sleep(2.5)  # by then all have noticed
                ranks.kill(victim)
            ended = ranks.join(30)
        assert_lost([o for o in ended if o.rank != victim], victim)


def test_a_host_cut_off_is_named_on_both_sides(tmp_path: Path) -> None:
    needs("system")
    if why := namespaces.missing():
        pytest.skip(why)
    options = FabricOptions(domain=namespaces.DEVICE)

    def attempt(folder: Path, timeout_ns: int) -> None:
        spec = spec_of(5, timeout_ns)
        with (
            Hosts(3) as hosts,
            mixed_ends(folder, (0, 0, 1, 1, 2), spec, options, tuple(hosts.names)) as ends,
            Ranks(goes_on, 5, spec, ends=ends) as ranks,
        ):
            for rank in range(5):
                assert ranks.message(rank, 30) == "started"
            hosts.cut(1)
            ended = ranks.join(30)
        for own in ((2, 3), (0, 1, 4)):
            assert_only(set(range(5)) - set(own), [ended[rank] for rank in own])
        for outcome in ended:
            assert isinstance(outcome.error, PeerTimeout | PeerLost), outcome

    patiently(attempt, tmp_path)
