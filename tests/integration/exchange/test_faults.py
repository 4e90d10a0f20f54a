"""What an exchange does when ranks are late, stopped, dead or call it wrongly, in real processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from ep_server.errors import GroupAborted, HookNotCalled, InvalidArgument, PeerTimeout
from ep_server.exchange.api import View
from ep_server.exchange.faults import Action, Fault
from ep_server.exchange.shm import NativeExchange
from tests.support.exchange.ranks import Outcome, Peer, Ranks, run_outcomes, run_ranks

TOKENS, HIDDEN, TOP_K = 4, 96, 3
SECOND = 1_000_000_000


def spec_of(num_ranks: int, timeout_ns: int = 10 * SECOND, num_banks: int = 2) -> dict[str, object]:
    """Three experts, on ranks 0, 1, 2 (mod R), so every token of `operation` goes to every rank."""
    return {
        "placement": tuple(e % num_ranks for e in range(3)),
        "max_tokens": TOKENS,
        "hidden": HIDDEN,
        "top_k": TOP_K,
        "timeout_ns": timeout_ns,
        "num_banks": num_banks,
    }


def rows_of(rank: int, step: int, tokens: int = TOKENS) -> torch.Tensor:
    """Row t of rank r carries r, t and the step; small integers, exact in bfloat16."""
    x = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16)
    x[:, 0], x[:, 1], x[:, 2] = rank, torch.arange(tokens), step % 128
    x[:, -1] = 1
    return x


def operation(exchange: NativeExchange, step: int, tokens: int = TOKENS) -> None:
    """One dispatch and combine with experts that return their input; checks every row of the masked group."""
    x = rows_of(exchange.spec.rank, step, tokens)
    ids = torch.arange(TOP_K).repeat(tokens, 1)
    received = exchange.dispatch_send(x, ids, torch.ones(tokens, TOP_K)).recv()
    alive = [r for r in range(exchange.spec.num_ranks) if r not in exchange.masked]
    if tokens == TOKENS:
        one = torch.cat([rows_of(r, step) for r in alive])
        assert torch.equal(received.rows, one.repeat(len(exchange.spec.local_experts), 1))
    y = exchange.combine_send(received.rows, received).recv()
    answering = sum(exchange.spec.placement[e] not in exchange.masked for e in range(3))
    assert torch.equal(y, x * answering)


def operations(exchange: NativeExchange, faults: tuple[Fault, ...], count: int) -> tuple[object, ...]:
    exchange.set_faults(faults)
    for step in range(count):
        operation(exchange, step)
    return exchange.masked, exchange.statistics()


def assert_noticed(survivors: list[Outcome], op: str, phase: str, peer: int) -> None:
    """At least one rank timed out on the peer; whoever did not was aborted by one that did."""
    timeouts = [o.error for o in survivors if isinstance(o.error, PeerTimeout)]
    assert timeouts, survivors
    for error in timeouts:
        assert (error.op, error.phase, error.peer) == (op, phase, peer)
    for outcome in survivors:
        assert isinstance(outcome.error, PeerTimeout | GroupAborted), outcome
        assert op in str(outcome.error)


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
    ended = run_outcomes(operations, 3, spec_of(3, SECOND), 30, args=((kill,), 20))
    assert ended[1].exitcode == -signal.SIGKILL
    assert_noticed([ended[0], ended[2]], *noticed, 1)


def test_masking_goes_on_without_a_killed_rank() -> None:
    kill = Fault(rank=1, op="dispatch", phase="send_rows", action=Action.KILL, epoch=3)
    ended = run_outcomes(
        operations, 3, spec_of(3, SECOND // 2), 30, args=((kill,), 20), exchange_kwargs={"on_timeout": "mask"}
    )
    assert ended[1].exitcode == -signal.SIGKILL
    for outcome in (ended[0], ended[2]):
        assert outcome.error is None, outcome.trace
        assert outcome.value[0] == {1}
        assert outcome.value[1]["counters"]["exchange_timeouts"] == 1


def later_than_rank_0(epoch: int) -> tuple[Fault, ...]:
    """Ranks 1 and 2 begin to wait in this dispatch well after rank 0, whose deadline then passes first."""
    return tuple(
        Fault(rank, "dispatch", "send_rows", Action.DELAY, epoch=epoch, delay_ns=SECOND // 2)
        for rank in (1, 2)
    )


def test_a_dropped_header_names_the_peer_that_did_not_send_it() -> None:
    drop = Fault(rank=2, op="combine", phase="send_header", action=Action.DROP, epoch=2, peer=0)
    ended = run_outcomes(operations, 3, spec_of(3, SECOND), 30, args=((drop, *later_than_rank_0(3)), 8))
    assert_noticed([ended[0]], "combine", "recv_header", 2)
    assert isinstance(ended[0].error, PeerTimeout)
    assert ended[0].error.expected == 2
    for outcome in ended[1:]:
        assert isinstance(outcome.error, GroupAborted)


def test_dropped_ack_stops_the_sender_before_it_overwrites() -> None:
    drop = Fault(rank=2, op="dispatch", phase="recv_consumed", action=Action.DROP, peer=0)
    first_reuse = 3  # of two banks
    late = later_than_rank_0(first_reuse)
    ended = run_outcomes(operations, 3, spec_of(3, SECOND), 30, args=((drop, *late), 8))
    assert isinstance(ended[0].error, PeerTimeout)
    assert (ended[0].error.phase, ended[0].error.peer) == ("send_bank", 2)


def test_a_delay_is_waited_for_and_charged_to_its_rank() -> None:
    late = SECOND // 2
    delay = Fault(2, "dispatch", "send_header", Action.DELAY, epoch=4, delay_ns=late)
    results = run_ranks(operations, 3, spec_of(3), 30, args=((delay,), 10))
    for rank in (0, 1):
        waits = results[rank][1]["peer_wait_ns"]
        assert waits["dispatch", 2] > late // 2
        assert results[rank][1]["histograms"]["dispatch/wait"]
    assert results[2][1]["peer_wait_ns"]["dispatch", 0] < results[0][1]["peer_wait_ns"]["dispatch", 2]


def stops_itself(exchange: NativeExchange, peer: Peer) -> list[bytes]:
    votes: list[bytes] = []
    for step in range(12):
        if exchange.spec.rank == 1 and step == 5:
            peer.tell("stopping")
            os.kill(os.getpid(), signal.SIGSTOP)
        votes = exchange.all_gather(f"{exchange.spec.rank}:{step}".encode())
    return votes


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def stop_for(ranks: Ranks, rank: int, seconds: float) -> None:
    """Waits until the rank has stopped itself, leaves it so for a while, continues it."""
    assert ranks.message(rank, 30) == "stopping"
    deadline = time.monotonic() + 10
    while not is_stopped(ranks.pid(rank)) and time.monotonic() < deadline:
        os.sched_yield()
    time.sleep(seconds)  # the length of the stall, not a synchronisation
    ranks.kill(rank, signal.SIGCONT)


def test_a_rank_stopped_within_the_deadline_only_delays_a_vote() -> None:
    with Ranks(stops_itself, 3, spec_of(3)) as ranks:
        stop_for(ranks, 1, 1.2)
        for outcome in ranks.join(30):
            assert outcome.error is None, outcome.trace
            assert outcome.value == [b"0:11", b"1:11", b"2:11"]


def stops_between_halves(exchange: NativeExchange, peer: Peer) -> None:
    for step in range(10):
        x, ids = rows_of(exchange.spec.rank, step), torch.arange(TOP_K).repeat(TOKENS, 1)
        pending = exchange.dispatch_send(x, ids, torch.ones(TOKENS, TOP_K))
        if exchange.spec.rank == 1 and step == 5:
            peer.tell("stopping")
            os.kill(os.getpid(), signal.SIGSTOP)
        received = pending.recv()
        y = exchange.combine_send(received.rows, received).recv()
        assert torch.equal(y, x * TOP_K)


def test_a_stopped_rank_only_delays_operations() -> None:
    with Ranks(stops_between_halves, 2, spec_of(2)) as ranks:
        stop_for(ranks, 1, 3.0)
        assert [o.error for o in ranks.join(30)] == [None, None]


def dies_in_barrier(exchange: NativeExchange) -> None:
    exchange.set_faults([Fault(1, "vote", "send_header", Action.KILL, epoch=2)])
    exchange.barrier()
    exchange.barrier()


def test_a_barrier_ends_when_the_heartbeat_of_a_peer_has_ended() -> None:
    ended = run_outcomes(
        dies_in_barrier, 3, spec_of(3, 60 * SECOND), 30, exchange_kwargs={"liveness_seconds": 1.0}
    )
    assert_noticed([ended[0], ended[2]], "vote", "gather", 1)


def hangs(exchange: NativeExchange, peer: Peer) -> None:
    """The loop of rank 1 comes to no vote before the others gave up; its heartbeat goes on."""
    exchange.barrier()
    if exchange.spec.rank == 1:
        peer.hear()
    try:
        exchange.all_gather(b"one")
    finally:
        peer.tell("ended")


def test_a_vote_has_the_deadline_of_all_waits() -> None:
    """Though the rank that hangs still beats, and though a beat would be believed in for an hour."""
    with Ranks(hangs, 3, spec_of(3, 2 * SECOND), exchange_kwargs={"liveness_seconds": 3600.0}) as ranks:
        for rank in (0, 2):
            assert ranks.message(rank, 15) == "ended"  # ten deadlines would be 20 s
        ranks.tell(1, "go on")
        ended = ranks.join(30)
    assert_noticed([ended[0], ended[2]], "vote", "gather", 1)
    assert isinstance(ended[1].error, GroupAborted)


def comes_late(exchange: NativeExchange, peer: Peer) -> None:
    exchange.barrier()
    if exchange.spec.rank == 1:
        peer.hear()
    exchange.barrier()


def test_a_barrier_waits_longer_than_a_vote() -> None:
    with Ranks(comes_late, 2, spec_of(2, SECOND // 5)) as ranks:
        time.sleep(1.0)  # how late rank 1 is
        ranks.tell(1, "go on")
        assert [o.error for o in ranks.join(30)] == [None, None]


def idles(exchange: NativeExchange, peer: Peer) -> float:
    exchange.barrier()
    if exchange.spec.rank == 1:
        peer.hear()
        exchange.barrier()
        return 0.0
    before = time.process_time()
    exchange.barrier()
    return time.process_time() - before


def test_a_waiting_rank_leaves_its_core_to_others() -> None:
    with Ranks(idles, 2, spec_of(2)) as ranks:
        time.sleep(1.5)  # how long rank 0 waits
        ranks.tell(1, "go on")
        busy = [o.value for o in ranks.join(30)]
    assert busy[0] < 0.2


def misses_hooks(exchange: NativeExchange, view: str) -> None:
    ids, weights = torch.arange(TOP_K).repeat(TOKENS, 1), torch.ones(TOKENS, TOP_K)
    pending = []
    for step in range(exchange.spec.num_banks):
        pending.append(exchange.dispatch_send(rows_of(exchange.spec.rank, step), ids, weights))
    held = [p.recv(View(view)) for p in pending] if view == "index" else []
    with pytest.raises(HookNotCalled, match="epoch 3 takes the bank of epoch 1"):
        exchange.dispatch_send(rows_of(exchange.spec.rank, 99), ids, weights)
    received = held or [p.recv() for p in pending]
    for step, got in enumerate(received):
        rows = got.rows[got.row_ids] if view == "index" else got.rows
        assert (rows[:, 2] == step).all()
    if view == "index":
        exchange.release(received[1])
        exchange.release(received[0])
        exchange.release(received[0])
    combines = [
        exchange.combine_send(torch.zeros(int(g.offsets[-1]), HIDDEN).bfloat16(), g) for g in received
    ]
    with pytest.raises(HookNotCalled, match="combine of epoch 3"):
        exchange.combine_send(torch.zeros(int(received[0].offsets[-1]), HIDDEN).bfloat16(), received[0])
    for combine in reversed(combines):
        combine.recv()
    for step in range(7):
        operation(exchange, step)


@pytest.mark.parametrize("view", ["compact", "index"])
def test_missed_hook_is_an_error_before_any_overwrite(view: str) -> None:
    run_ranks(misses_hooks, 2, spec_of(2), 30, args=(view,))


def back_to_back(exchange: NativeExchange, rounds: int) -> None:
    """Ranks with no rows at all, others running ahead, over all banks many times."""
    for step in range(rounds):
        tokens = TOKENS if exchange.spec.rank == step % exchange.spec.num_ranks else 0
        operation(exchange, step, tokens) if tokens == 0 else lonely(exchange, step)


def lonely(exchange: NativeExchange, step: int) -> None:
    x = rows_of(exchange.spec.rank, step)
    received = exchange.dispatch_send(
        x, torch.arange(TOP_K).repeat(TOKENS, 1), torch.ones(TOKENS, TOP_K)
    ).recv()
    assert torch.equal(exchange.combine_send(received.rows, received).recv(), x * TOP_K)


def test_banks_are_reused_safely_when_ranks_have_no_rows() -> None:
    run_ranks(back_to_back, 3, spec_of(3), 30, args=(60,))


def interleaved(exchange: NativeExchange, rounds: int) -> None:
    """Two micro-batches: D0s D1s D0r C0s D1r C1s C0r C1r."""
    ids, weights = torch.arange(TOP_K).repeat(TOKENS, 1), torch.ones(TOKENS, TOP_K)
    for step in range(rounds):
        x = [rows_of(exchange.spec.rank, 2 * step + b) for b in range(2)]
        sent = [exchange.dispatch_send(x[b], ids, weights) for b in range(2)]
        combines = []
        for b in range(2):
            received = sent[b].recv()
            assert (received.rows[:, 2] == (2 * step + b) % 128).all()
            combines.append(exchange.combine_send(received.rows, received))
        for b in range(2):
            assert torch.equal(combines[b].recv(), x[b] * TOP_K)


def test_two_micro_batches_interleave() -> None:
    run_ranks(interleaved, 3, spec_of(3), 30, args=(30,))


def aborts_and_resets(exchange: NativeExchange) -> int:
    operation(exchange, 0)
    if exchange.spec.rank == 0:
        threading.Thread(target=exchange.abort).start()
    with pytest.raises(GroupAborted, match="rank 0 aborted the group"):
        while True:
            exchange.barrier()
    with pytest.raises(GroupAborted):  # sticky
        operation(exchange, 1)
    exchange.reset()
    for step in range(9):
        operation(exchange, step)
    exchange.barrier()
    return exchange._native.generation


def test_an_abort_ends_all_waits_until_the_group_is_reset() -> None:
    assert run_ranks(aborts_and_resets, 3, spec_of(3), 30) == [1, 1, 1]


def masked_from_another_thread(exchange: NativeExchange, peer: Peer) -> frozenset[int]:
    operation(exchange, 0)
    if exchange.spec.rank == 2:
        peer.hear()  # absent until the others have gone on without it
    else:
        timer = threading.Timer(0.3, exchange.mask, [[2]])
        timer.start()
        operation(exchange, 1)
        timer.join()
        assert exchange.masked == {2}
        operation(exchange, 2)
        peer.tell("done")
    exchange.reset()
    for step in range(5):
        operation(exchange, step)
    return exchange.masked


def test_a_mask_wakes_the_waiter_and_a_reset_lifts_it() -> None:
    with Ranks(masked_from_another_thread, 3, spec_of(3)) as ranks:
        for rank in (0, 1):
            assert ranks.message(rank, 20) == "done"
        ranks.tell(2, "come back")
        for outcome in ranks.join(30):
            assert outcome.error is None, outcome.trace
            assert outcome.value == frozenset()


class Rung(Exception):
    """Raised by a signal handler."""


def ring(*_: object) -> None:
    raise Rung


def interrupted(exchange: NativeExchange, peer: Peer) -> None:
    if exchange.spec.rank == 0:
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Rung):
            exchange.barrier()
        peer.tell("interrupted")
    else:
        peer.hear()
        with pytest.raises(GroupAborted):
            exchange.barrier()


def test_a_signal_handler_may_end_a_wait() -> None:
    with Ranks(interrupted, 2, spec_of(2)) as ranks:
        assert ranks.message(0, 20) == "interrupted"
        ranks.tell(1, "go")
        assert [o.error for o in ranks.join(30)] == [None, None]


def second_thread(exchange: NativeExchange, peer: Peer) -> str:
    if exchange.spec.rank == 1:
        peer.hear()
        exchange.barrier()
        return ""
    waiting = threading.Thread(target=exchange.barrier)
    waiting.start()
    while not exchange.statistics()["counters"]["exchange_sleeps"]:
        os.sched_yield()
    with pytest.raises(InvalidArgument, match="thread") as error:
        exchange.barrier()
    peer.tell("refused")
    waiting.join()
    return str(error.value)


def test_a_second_thread_is_refused() -> None:
    with Ranks(second_thread, 2, spec_of(2)) as ranks:
        assert ranks.message(0, 20) == "refused"
        ranks.tell(1, "go")
        assert "thread" in ranks.join(30)[0].value
