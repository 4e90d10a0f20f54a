"""What an exchange does when ranks are late, stopped, dead or call it wrongly, in real processes."""

from __future__ import annotations

import signal
import time

import pytest

from ep_server.errors import GroupAborted, PeerTimeout
from ep_server.exchange.faults import Action, Fault
from tests.support.exchange.fault_programs import (
    SECOND,
    aborts_and_resets,
    assert_noticed,
    back_to_back,
    comes_late,
    dies_in_barrier,
    hangs,
    idles,
    interleaved,
    interrupted,
    later_than_rank_0,
    masked_from_another_thread,
    misses_hooks,
    operations,
    second_thread,
    spec_of,
    stop_for,
    stops_between_halves,
    stops_itself,
)
from tests.support.exchange.ranks import Ranks, run_outcomes, run_ranks


@pytest.mark.parametrize(
    ("op", "phase", "noticed"),
    [
        ("dispatch", "send_rows", ("dispatch", "recv_header")),
        ("dispatch", "recv_header", ("combine", "recv_header")),
        ("combine", "send_rows", ("combine", "recv_header")),
    ],
)
def test_a_killed_rank_times_out_its_peers_within_the_deadline(
    op: str, phase: str, noticed: tuple[str, str]
) -> None:
    kill = Fault(rank=1, op=op, phase=phase, action=Action.KILL, epoch=3)
    ended = run_outcomes(operations, 3, spec_of(3, 2 * SECOND), 30, args=((kill,), 20))
    assert ended[1].exitcode == -signal.SIGKILL
    assert_noticed([ended[0], ended[2]], *noticed, 1)


def test_masking_goes_on_without_a_killed_rank() -> None:
    kill = Fault(rank=1, op="dispatch", phase="send_rows", action=Action.KILL, epoch=3)
    ended = run_outcomes(
        operations, 3, spec_of(3, 5 * SECOND), 60, args=((kill,), 20), exchange_kwargs={"on_timeout": "mask"}
    )
    assert ended[1].exitcode == -signal.SIGKILL
    for outcome in (ended[0], ended[2]):
        assert outcome.error is None, outcome.trace
        assert outcome.value[0] == {1}
        assert outcome.value[1]["counters"]["exchange_timeouts"] == 1


def test_a_dropped_header_names_the_peer_that_did_not_send_it() -> None:
    drop = Fault(rank=2, op="combine", phase="send_header", action=Action.DROP, epoch=2, peer=0)
    ended = run_outcomes(operations, 3, spec_of(3, 3 * SECOND), 30, args=((drop, *later_than_rank_0(3)), 8))
    assert_noticed([ended[0]], "combine", "recv_header", 2)
    assert isinstance(ended[0].error, PeerTimeout)
    assert ended[0].error.expected == 2
    for outcome in ended[1:]:
        assert isinstance(outcome.error, GroupAborted)


def test_dropped_ack_stops_the_sender_before_it_overwrites() -> None:
    drop = Fault(rank=2, op="dispatch", phase="recv_consumed", action=Action.DROP, peer=0)
    first_reuse = 3  # of two banks
    late = later_than_rank_0(first_reuse)
    ended = run_outcomes(operations, 3, spec_of(3, 3 * SECOND), 30, args=((drop, *late), 8))
    assert isinstance(ended[0].error, PeerTimeout)
    assert (ended[0].error.phase, ended[0].error.peer) == ("send_bank", 2)


def test_a_delay_is_waited_for_and_charged_to_its_rank() -> None:
    for late in (SECOND // 2, 8 * SECOND):  # the second one if another rank was held up for as long
        delay = Fault(2, "dispatch", "send_header", Action.DELAY, epoch=4, delay_ns=late)
        results = run_ranks(operations, 3, spec_of(3, 30 * SECOND), 60, args=((delay,), 10))
        waits = [result[1]["peer_wait_ns"] for result in results]
        if waits[2]["dispatch", 0] < late // 2 < min(waits[rank]["dispatch", 2] for rank in (0, 1)):
            break
    for rank in (0, 1):
        assert waits[rank]["dispatch", 2] > late // 2
        assert results[rank][1]["histograms"]["dispatch/wait"]
    assert waits[2]["dispatch", 0] < waits[0]["dispatch", 2]


def test_a_rank_stopped_within_the_deadline_only_delays_a_vote() -> None:
    with Ranks(stops_itself, 3, spec_of(3)) as ranks:
        stop_for(ranks, 1, 1.2)
        for outcome in ranks.join(30):
            assert outcome.error is None, outcome.trace
            assert outcome.value == [b"0:11", b"1:11", b"2:11"]


def test_a_stopped_rank_only_delays_operations() -> None:
    with Ranks(stops_between_halves, 2, spec_of(2)) as ranks:
        stop_for(ranks, 1, 3.0)
        assert [o.error for o in ranks.join(30)] == [None, None]


def test_a_barrier_ends_when_the_heartbeat_of_a_peer_has_ended() -> None:
    ended = run_outcomes(
        dies_in_barrier, 3, spec_of(3, 60 * SECOND), 30, exchange_kwargs={"liveness_seconds": 1.0}
    )
    assert_noticed([ended[0], ended[2]], "vote", "gather", 1)


def test_a_vote_has_the_deadline_of_all_waits() -> None:
    """Though the rank that hangs still beats, and though a beat would be believed in for an hour."""
    with Ranks(hangs, 3, spec_of(3, 3 * SECOND), exchange_kwargs={"liveness_seconds": 3600.0}) as ranks:
        for rank in (0, 2):
            assert ranks.message(rank, 25) == "ended"  # ten deadlines would be 30 s
        ranks.tell(1, "go on")
        ended = ranks.join(30)
    assert_noticed([ended[0], ended[2]], "vote", "gather", 1)
    assert isinstance(ended[1].error, GroupAborted)


def test_a_barrier_waits_longer_than_a_vote() -> None:
    with Ranks(comes_late, 2, spec_of(2, SECOND // 5)) as ranks:
        time.sleep(1.0)  # how late rank 1 is
        ranks.tell(1, "go on")
        assert [o.error for o in ranks.join(30)] == [None, None]


def test_a_waiting_rank_leaves_its_core_to_others() -> None:
    with Ranks(idles, 2, spec_of(2)) as ranks:
        time.sleep(1.5)  # how long rank 0 waits
        ranks.tell(1, "go on")
        busy = [o.value for o in ranks.join(30)]
    assert busy[0] < 0.2


@pytest.mark.parametrize("view", ["compact", "index"])
def test_missed_hook_is_an_error_before_any_overwrite(view: str) -> None:
    run_ranks(misses_hooks, 2, spec_of(2), 30, args=(view,))


def test_banks_are_reused_safely_when_ranks_have_no_rows() -> None:
    run_ranks(back_to_back, 3, spec_of(3), 30, args=(60,))


def test_two_micro_batches_interleave() -> None:
    run_ranks(interleaved, 3, spec_of(3), 30, args=(30,))


def test_an_abort_ends_all_waits_until_the_group_is_reset() -> None:
    assert run_ranks(aborts_and_resets, 3, spec_of(3), 30) == [1, 1, 1]


def test_a_mask_wakes_the_waiter_and_a_reset_lifts_it() -> None:
    with Ranks(masked_from_another_thread, 3, spec_of(3)) as ranks:
        for rank in (0, 1):
            assert ranks.message(rank, 20) == "done"
        ranks.tell(2, "come back")
        for outcome in ranks.join(30):
            assert outcome.error is None, outcome.trace
            assert outcome.value == frozenset()


def test_a_signal_handler_may_end_a_wait() -> None:
    with Ranks(interrupted, 2, spec_of(2)) as ranks:
        assert ranks.message(0, 20) == "interrupted"
        ranks.tell(1, "go")
        assert [o.error for o in ranks.join(30)] == [None, None]


def test_a_second_thread_is_refused() -> None:
    with Ranks(second_thread, 2, spec_of(2)) as ranks:
        assert ranks.message(0, 20) == "refused"
        ranks.tell(1, "go")
        assert "thread" in ranks.join(30)[0].value
