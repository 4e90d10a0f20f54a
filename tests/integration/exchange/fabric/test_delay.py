"""Emulated latency: messages become visible late, in order, and the sender does not wait for them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from ep_server.errors import ConfigError, GroupAborted
from ep_server.exchange.fabric.settings import MAX_DELAY_SECONDS, FabricOptions
from ep_server.exchange.host import HostExchange
from tests.support.exchange import fault_programs as programs
from tests.support.exchange.fault_programs import TOP_K, rows_of, spec_of
from tests.support.exchange.process_group import run_group
from tests.support.exchange.ranks import Ranks, run_ranks
from tests.support.fabric.fabric_ends import ends, loopback, needs
from tests.support.fabric.suites import whole_suite

NS = 1_000_000_000
LONG_SECONDS = 0.5


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


@pytest.mark.parametrize("disorder", [0, 3])
def test_a_delay_changes_no_result(disorder: int, tmp_path: Path) -> None:
    made = ends(tmp_path, 3, delayed(0.002, disorder=disorder))
    run_ranks(programs.back_to_back, 3, spec_of(3), 60, args=(20,), ends=made)


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
