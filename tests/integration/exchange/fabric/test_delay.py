"""Emulated latency: messages become visible so long after they were sent, and the sender does not wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ep_server.errors import ConfigError, GroupAborted, StartupError
from ep_server.exchange.fabric.settings import MAX_DELAY_SECONDS, FabricOptions
from ep_server.exchange.host import HostExchange
from tests.support.exchange import fault_programs as programs
from tests.support.exchange.fault_programs import TOP_K, rows_of, spec_of
from tests.support.exchange.process_group import run_group
from tests.support.exchange.ranks import Peer, Ranks, run_outcomes, run_ranks
from tests.support.fabric import other_clock
from tests.support.fabric.fabric_ends import FabricEnd, ends, loopback, needs
from tests.support.fabric.mixed_ends import mixed_ends
from tests.support.fabric.suites import whole_suite
from tests.support.fabric.wrapped import Wrapped

NS = 1_000_000_000
LONG_SECONDS = 0.5
LEAST_SECONDS = 1e-9  # all that makes messages late runs, and they are not


def delayed(seconds: float, **options: int) -> FabricOptions:
    needs("system")
    return loopback(delay_seconds=seconds, **options)


def sends_and_receives(exchange: HostExchange) -> tuple[int, int, int]:
    """Clock before a dispatch is sent, once the send has returned, and once all rows were there; ns."""
    x, ids = rows_of(exchange.spec.rank, 0), torch.arange(TOP_K).repeat(len(rows_of(0, 0)), 1)
    exchange.barrier()
    before = time.monotonic_ns()
    pending = exchange.dispatch_send(x, ids, torch.ones(ids.shape))
    sent = time.monotonic_ns()
    received = pending.recv()
    seen = time.monotonic_ns()
    exchange.combine_send(received.rows, received).recv()
    return before, sent, seen


def test_rows_appear_after_the_delay_and_senders_go_on(tmp_path: Path) -> None:
    made = ends(tmp_path, 2, delayed(LONG_SECONDS))
    first, second = run_ranks(sends_and_receives, 2, spec_of(2), 60, ends=made)
    for (before, sent, _), (_, _, seen) in ((first, second), (second, first)):
        assert seen - before >= LONG_SECONDS * NS
        assert sent < seen


def test_rows_of_other_hosts_alone_are_late(tmp_path: Path) -> None:
    spec = spec_of(4)
    with mixed_ends(tmp_path, (0, 0, 1, 1), spec, delayed(LONG_SECONDS)) as made:
        ranks = run_ranks(sends_and_receives, 4, spec, 60, ends=made)
    for rank, (_, _, seen) in enumerate(ranks):
        for before, sent, _ in (ranks[2:], ranks[:2])[rank // 2]:
            assert seen - before >= LONG_SECONDS * NS
            assert sent < seen


def receives_late(exchange: HostExchange, turns: int, peer: Peer) -> list[float]:
    """Rank 0 sends while rank 1 is stopped. How long rank 1 then waits for the rows, by turn; s."""
    x, ids = rows_of(exchange.spec.rank, 0), torch.arange(TOP_K).repeat(len(rows_of(0, 0)), 1)
    waited = []
    for _ in range(turns):
        exchange.barrier()
        peer.tell("ready")
        peer.hear()
        pending = exchange.dispatch_send(x, ids, torch.ones(ids.shape))
        if exchange.spec.rank == 0:
            peer.tell("sent")
        begin = time.monotonic()
        received = pending.recv()
        waited.append(time.monotonic() - begin)
        exchange.combine_send(received.rows, received).recv()
    return waited


@pytest.mark.slow  # it asserts a time
def test_a_late_receiver_waits_no_longer(tmp_path: Path) -> None:
    """The time until it looked counts. One turn of several will do: it may be late for other reasons."""
    turns, made = 3, ends(tmp_path, 2, delayed(LONG_SECONDS))
    with Ranks(receives_late, 2, spec_of(2), args=(turns,), ends=made) as ranks:
        for _ in range(turns):
            assert [ranks.message(rank, 60) for rank in (0, 1)] == ["ready", "ready"]
            os.kill(ranks.processes[1].pid, signal.SIGSTOP)  # its thread cannot look, either
            ranks.tell(0, "send")
            assert ranks.message(0, 60) == "sent"
            time.sleep(1.2 * LONG_SECONDS)
            os.kill(ranks.processes[1].pid, signal.SIGCONT)
            ranks.tell(1, "receive")
        _, late = ranks.join(60)
    assert min(late.value) < LONG_SECONDS


@pytest.mark.parametrize(("seconds", "disorder"), [(0.002, 0), (0.002, 3), (LEAST_SECONDS, 0)])
def test_a_delay_changes_no_result(seconds: float, disorder: int, tmp_path: Path) -> None:
    made = ends(tmp_path, 3, delayed(seconds, disorder=disorder))
    run_ranks(programs.back_to_back, 3, spec_of(3), 60, args=(20,), ends=made)


def test_a_delay_changes_no_result_on_shared_hosts(tmp_path: Path) -> None:
    spec = spec_of(4)
    with mixed_ends(tmp_path, (0, 0, 1, 1), spec, delayed(0.002)) as made:
        run_ranks(programs.back_to_back, 4, spec, 60, args=(20,), ends=made)


@pytest.mark.slow
def test_the_conformance_suite_passes_with_a_delay() -> None:
    by_rank = run_group(whole_suite, 2, args=(delayed(0.001),), timeout=300)
    failures = [f"{name}: {text}" for results in by_rank for name, text in results.items() if text]
    assert not failures, "\n".join(failures[:5])


def numbers_votes(exchange: HostExchange, count: int) -> list[list[bytes]]:
    return [exchange.all_gather(f"{exchange.spec.rank}:{step}".encode()) for step in range(count)]


def test_delayed_votes_stay_in_order(tmp_path: Path) -> None:
    made = ends(tmp_path, 2, delayed(0.005))
    votes = run_ranks(numbers_votes, 2, spec_of(2), 60, args=(40,), ends=made)
    assert votes == [[[f"0:{step}".encode(), f"1:{step}".encode()] for step in range(40)]] * 2


def aborts_behind_rows(exchange: HostExchange) -> None:
    x, ids = rows_of(exchange.spec.rank, 0), torch.arange(TOP_K).repeat(len(rows_of(0, 0)), 1)
    exchange.barrier()
    pending = exchange.dispatch_send(x, ids, torch.ones(ids.shape))
    if exchange.spec.rank == 0:
        exchange.group.abort()
    else:
        pending.recv()


def test_an_abort_overtakes_delayed_rows(tmp_path: Path) -> None:
    made = ends(tmp_path, 2, delayed(MAX_DELAY_SECONDS))
    with Ranks(aborts_behind_rows, 2, spec_of(2), ends=made) as ranks:
        _, waiting = ranks.join(60)
    assert isinstance(waiting.error, GroupAborted), waiting


@pytest.mark.parametrize("seconds", [-0.001, 1.5])
def test_a_delay_outside_its_range_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="delay_seconds"):
        FabricOptions(delay_seconds=seconds)


def test_a_provider_without_room_for_times_is_refused(tmp_path: Path) -> None:
    needs("system")
    library = str(Wrapped(cq_data=4).build(tmp_path))
    options = FabricOptions(library, address="127.0.0.1", delay_seconds=0.001)
    for outcome in run_outcomes(sends_and_receives, 2, spec_of(2), 60, ends=ends(tmp_path, 2, options)):
        assert isinstance(outcome.error, StartupError), outcome
        assert "completion data of 4 bytes, 8 needed with delay_seconds" in str(outcome.error)


def test_a_rank_without_a_delay_is_refused(tmp_path: Path) -> None:
    meeting = str(tmp_path / "meeting")
    made = [FabricEnd(meeting, delayed(0.001)), FabricEnd(meeting, loopback())]
    first, _ = run_outcomes(sends_and_receives, 2, spec_of(2, timeout_ns=3 * NS), 60, ends=made)
    assert isinstance(first.error, StartupError), first
    assert "rank 1 sends no times" in str(first.error)


@pytest.mark.parametrize(("ahead", "refuses"), [(5, 0), pytest.param(100_000, 1, marks=pytest.mark.slow)])
def test_a_rank_by_another_clock_is_refused(ahead: int, refuses: int, tmp_path: Path) -> None:
    needs("system")
    if why := other_clock.missing():
        pytest.skip(why)
    program = [sys.executable, "-m", "tests.support.fabric.other_clock"]
    starts = [
        subprocess.Popen(
            [*clock, *program, str(rank), str(tmp_path / "meeting")], stdout=subprocess.PIPE, text=True
        )
        for rank, clock in enumerate(([], other_clock.by_clock(ahead)))
    ]
    said = [start.communicate(timeout=120)[0] for start in starts]
    assert f"rank {1 - refuses} has another clock" in said[refuses], said
