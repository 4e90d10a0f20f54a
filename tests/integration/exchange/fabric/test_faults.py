"""What ranks on a network do when one is late, stopped, dead or masked: real processes over real sockets."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from ep_server.errors import GroupAborted, PeerLost, PeerTimeout
from ep_server.exchange.faults import Action, Fault
from tests.support.exchange import fault_programs as programs
from tests.support.exchange.fault_programs import SECOND, later_than_rank_0, spec_of, stop_for, waits_behind
from tests.support.exchange.ranks import Ranks, run_outcomes, run_ranks
from tests.support.fabric.fabric_ends import FabricEnd, ends, loopback, needs
from tests.support.fabric.fault_programs import assert_lost


@pytest.fixture
def three(tmp_path: Path) -> list[FabricEnd]:
    needs("system")
    return ends(tmp_path, 3, loopback())


@pytest.mark.parametrize(
    ("library", "op"),
    [
        ("system", "combine"),
        ("wheel", "dispatch"),
        pytest.param("system", "dispatch", marks=pytest.mark.slow),
        pytest.param("wheel", "combine", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_is_named_by_every_survivor(library: str, op: str, tmp_path: Path) -> None:
    needs(library)
    kill = Fault(rank=1, op=op, phase="send_rows", action=Action.KILL, epoch=3)
    ended = run_outcomes(
        programs.operations,
        3,
        spec_of(3, 2 * SECOND),
        30,
        args=((kill,), 20),
        ends=ends(tmp_path, 3, loopback(library)),
    )
    assert ended[1].exitcode == -signal.SIGKILL
    assert_lost([ended[0], ended[2]], 1)


def test_a_barrier_ends_when_the_heartbeat_of_a_peer_has_ended(three: list[FabricEnd]) -> None:
    ended = run_outcomes(
        programs.dies_in_barrier,
        3,
        spec_of(3, 60 * SECOND),
        30,
        exchange_kwargs={"liveness_seconds": 1.0},
        ends=three,
    )
    assert_lost([ended[0], ended[2]], 1)


def test_masking_goes_on_without_a_killed_rank(three: list[FabricEnd]) -> None:
    kill = Fault(rank=1, op="dispatch", phase="send_rows", action=Action.KILL, epoch=3)
    options = {"on_timeout": "mask"}
    ended = run_outcomes(
        programs.operations,
        3,
        spec_of(3, 2 * SECOND),
        30,
        args=((kill,), 20),
        exchange_kwargs=options,
        ends=three,
    )
    assert ended[1].exitcode == -signal.SIGKILL
    for outcome in (ended[0], ended[2]):
        assert outcome.error is None, outcome.trace
        assert outcome.value[0] == {1}


def test_a_dropped_header_names_the_peer_and_tells_it_so(three: list[FabricEnd]) -> None:
    drop = Fault(rank=2, op="combine", phase="send_header", action=Action.DROP, epoch=2, peer=0)
    faults = (drop, *later_than_rank_0(3))
    ended = run_outcomes(programs.operations, 3, spec_of(3, 3 * SECOND), 30, args=(faults, 8), ends=three)
    error = ended[0].error
    assert isinstance(error, PeerTimeout)
    assert (error.op, error.phase, error.peer, error.expected) == ("combine", "recv_header", 2, 2)
    assert isinstance(ended[1].error, PeerLost)
    assert ended[1].error.peer == 2
    assert isinstance(ended[2].error, GroupAborted)  # it lives, and hears that it was given up


def test_dropped_ack_stops_the_sender_before_it_overwrites(three: list[FabricEnd]) -> None:
    drop = Fault(rank=2, op="dispatch", phase="recv_consumed", action=Action.DROP, peer=0)
    faults = (drop, *later_than_rank_0(3))
    ended = run_outcomes(programs.operations, 3, spec_of(3, 3 * SECOND), 30, args=(faults, 8), ends=three)
    assert isinstance(ended[0].error, PeerTimeout)
    assert (ended[0].error.phase, ended[0].error.peer) == ("send_bank", 2)


def test_who_waits_behind_another_rank_names_the_one_that_hangs(three: list[FabricEnd]) -> None:
    ended = run_outcomes(waits_behind, 3, spec_of(3, 3 * SECOND), 30, ends=three)
    assert isinstance(ended[0].error, PeerTimeout)
    assert_lost(ended[:2], 2)


def test_a_stopped_rank_only_delays_operations(tmp_path: Path) -> None:
    needs("system")
    with Ranks(programs.stops_between_halves, 2, spec_of(2), ends=ends(tmp_path, 2, loopback())) as ranks:
        stop_for(ranks, 1, 1.5)
        assert [o.error for o in ranks.join(30)] == [None, None]


def test_an_abort_ends_all_waits_until_the_group_is_reset(three: list[FabricEnd]) -> None:
    assert run_ranks(programs.aborts_and_resets, 3, spec_of(3), 30, ends=three) == [1, 1, 1]


def test_a_mask_wakes_the_waiter_and_a_reset_lifts_it(three: list[FabricEnd]) -> None:
    with Ranks(programs.masked_from_another_thread, 3, spec_of(3), ends=three) as ranks:
        for rank in (0, 1):
            assert ranks.message(rank, 20) == "done"
        ranks.tell(2, "come back")
        for outcome in ranks.join(30):
            assert outcome.error is None, outcome.trace
            assert outcome.value == frozenset()


def test_a_waiting_rank_leaves_its_core_to_others(tmp_path: Path) -> None:
    needs("system")
    with Ranks(programs.idles, 2, spec_of(2), ends=ends(tmp_path, 2, loopback())) as ranks:
        time.sleep(1.5)  # how long rank 0 waits
        ranks.tell(1, "go on")
        busy = [o.value for o in ranks.join(30)]
    assert busy[0] < 0.2


def test_banks_are_reused_safely_when_ranks_run_ahead(three: list[FabricEnd]) -> None:
    run_ranks(programs.back_to_back, 3, spec_of(3), 30, args=(60,), ends=three)
