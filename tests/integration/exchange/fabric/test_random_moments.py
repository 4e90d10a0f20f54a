"""A rank killed, or a host cut off, at a random moment: every survivor names it, and where it was missed."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ep_server.errors import ExchangeError, PeerLost, PeerTimeout
from ep_server.exchange.host import HostExchange
from ep_server.testing import namespaces
from ep_server.testing.namespaces import Hosts
from tests.support.exchange.fault_programs import operation, spec_of
from tests.support.exchange.ranks import Outcome, Peer, Ranks
from tests.support.fabric.fabric_ends import FabricEnd, ends, loopback, needs
from tests.support.fabric.fault_programs import assert_only, one_each, patiently

RANKS, DEADLINE_SECONDS = 3, 1.0
# Where a rank waits for another, or finds that nothing can be written to it any more.
WAITS = {(op, phase) for op in ("dispatch", "combine") for phase in ("send_bank", "send_rows", "recv_header")}
OTHER_WORK_SECONDS = 1.0  # what a survivor may be late because this machine does other things
SLOW = (pytest.mark.slow, pytest.mark.timeout(900))


def works(exchange: HostExchange, peer: Peer) -> None:
    """Tells when it begins, and when it hears of a loss."""
    exchange.barrier()  # ranks that started late are waited for before any deadline counts
    peer.tell(time.monotonic())
    try:
        for step in range(1 << 30):
            operation(exchange, step)
    except ExchangeError:
        peer.tell(time.monotonic())
        raise


def lose(
    made: list[FabricEnd], victim: int, wait: float, end: Callable[[Ranks], None], timeout_ns: int
) -> float:
    """One group that loses a rank `wait` seconds after it began; how long until the last survivor knew."""
    with Ranks(works, RANKS, spec_of(RANKS, timeout_ns), ends=made) as ranks:
        for rank in range(RANKS):
            ranks.message(rank, 30)
        signal.sigtimedwait([], wait)  # not a synchronisation: the random moment
        ended = time.monotonic()
        end(ranks)
        survivors = [rank for rank in range(RANKS) if rank != victim]
        knew = [ranks.message(rank, 30) for rank in survivors]
        outcomes = ranks.join(30)
    assert_right([outcomes[rank] for rank in survivors], victim)
    return max(knew) - ended


def assert_right(survivors: list[Outcome], victim: int) -> None:
    """All name the victim; who noticed it himself was in a wait, and the others tell of that same wait."""
    assert_only([victim], survivors)
    noticed = {}
    for outcome in survivors:
        error = outcome.error
        assert isinstance(error, PeerTimeout | PeerLost), outcome
        assert (error.op, error.phase) in WAITS, outcome
        if error.rank == outcome.rank:
            noticed[error.rank] = (error.op, error.phase)
    for outcome in survivors:
        error = outcome.error
        assert isinstance(error, PeerTimeout | PeerLost)
        assert noticed.get(error.rank) == (error.op, error.phase), survivors


def assert_in_time(seconds: list[float]) -> None:
    late = [s for s in seconds if s > DEADLINE_SECONDS + 1 + OTHER_WORK_SECONDS]
    assert not late, f"{len(late)} of {len(seconds)}: {late}"
    in_time = sum(s <= DEADLINE_SECONDS + 1 for s in seconds)
    print(f"{in_time} of {len(seconds)} within the deadline + 1 s; last survivor after {max(seconds):.2f} s")


@contextlib.contextmanager
def three_hosts() -> Iterator[Hosts]:
    if why := namespaces.missing():
        pytest.skip(why)
    with Hosts(RANKS) as hosts:
        yield hosts


@pytest.mark.parametrize("library", ["system", "wheel"])
@pytest.mark.parametrize("times", [2, pytest.param(50, marks=SLOW)])
def test_a_killed_rank_is_named_with_the_wait_that_missed_it(
    times: int, library: str, tmp_path: Path
) -> None:
    needs(library)
    moments, seconds = random.Random(4), []
    for turn in range(times):
        (own := tmp_path / str(turn)).mkdir()
        victim, moment = turn % RANKS, moments.uniform(0.0, 0.3)

        def attempt(folder: Path, timeout_ns: int, victim: int = victim, moment: float = moment) -> None:
            made = ends(folder, RANKS, loopback(library))
            seconds.append(lose(made, victim, moment, lambda ranks: ranks.kill(victim), timeout_ns))

        patiently(attempt, own, DEADLINE_SECONDS)
    if times > 2:
        assert_in_time(seconds)


@pytest.mark.parametrize("times", [1, pytest.param(50, marks=SLOW)])
def test_a_host_cut_off_is_named_with_the_wait_that_missed_it(times: int, tmp_path: Path) -> None:
    needs("system")
    moments, seconds = random.Random(5), []
    with three_hosts() as hosts:
        for turn in range(times):
            (own := tmp_path / str(turn)).mkdir()
            victim, moment = turn % RANKS, moments.uniform(0.0, 0.3)

            def attempt(folder: Path, timeout_ns: int, victim: int = victim, moment: float = moment) -> None:
                hosts.mend(victim)
                made = one_each(hosts, folder)
                seconds.append(lose(made, victim, moment, lambda _: hosts.cut(victim), timeout_ns))

            patiently(attempt, own, DEADLINE_SECONDS)
            hosts.mend(victim)
    if times > 1:
        assert_in_time(seconds)
