"""What ranks run in tests of faults: late, stopped, dead or misused ranks, over any transport."""

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
from ep_server.exchange.host import HostExchange
from tests.support.exchange.ranks import Outcome, Peer, Ranks

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


def operation(exchange: HostExchange, step: int, tokens: int = TOKENS) -> None:
    """One dispatch and combine with experts that return their input; checks every row of the masked group."""
    x = rows_of(exchange.spec.rank, step, tokens)
    ids = torch.arange(TOP_K).repeat(tokens, 1)
    received = exchange.dispatch_send(x, ids, torch.ones(tokens, TOP_K)).recv()
    alive = [r for r in range(exchange.spec.num_ranks) if r not in exchange.group.masked]
    if tokens == TOKENS:
        one = torch.cat([rows_of(r, step) for r in alive])
        assert torch.equal(received.rows, one.repeat(len(exchange.spec.local_experts), 1))
    y = exchange.combine_send(received.rows, received).recv()
    answering = sum(exchange.spec.placement[e] not in exchange.group.masked for e in range(3))
    assert torch.equal(y, x * answering)


def operations(exchange: HostExchange, faults: tuple[Fault, ...], count: int) -> tuple[object, ...]:
    exchange.barrier()  # ranks that started late are waited for before any deadline counts
    exchange.group.set_faults(faults)
    for step in range(count):
        operation(exchange, step)
    return exchange.group.masked, exchange.statistics()


def assert_noticed(survivors: list[Outcome], op: str, phase: str, peer: int) -> None:
    """At least one rank timed out on the peer; whoever did not was aborted by one that did."""
    timeouts = [o.error for o in survivors if isinstance(o.error, PeerTimeout)]
    assert timeouts, survivors
    for error in timeouts:
        assert (error.op, error.phase, error.peer) == (op, phase, peer)
    for outcome in survivors:
        assert isinstance(outcome.error, PeerTimeout | GroupAborted), outcome
        assert op in str(outcome.error)


def later_than_rank_0(epoch: int) -> tuple[Fault, ...]:
    """Ranks 1 and 2 begin to wait in this dispatch well after rank 0, whose deadline then passes first."""
    return tuple(
        Fault(rank, "dispatch", "send_rows", Action.DELAY, epoch=epoch, delay_ns=2 * SECOND)
        for rank in (1, 2)
    )


def stops_itself(exchange: HostExchange, peer: Peer) -> list[bytes]:
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


def stops_between_halves(exchange: HostExchange, peer: Peer) -> None:
    for step in range(10):
        x, ids = rows_of(exchange.spec.rank, step), torch.arange(TOP_K).repeat(TOKENS, 1)
        pending = exchange.dispatch_send(x, ids, torch.ones(TOKENS, TOP_K))
        if exchange.spec.rank == 1 and step == 5:
            peer.tell("stopping")
            os.kill(os.getpid(), signal.SIGSTOP)
        received = pending.recv()
        y = exchange.combine_send(received.rows, received).recv()
        assert torch.equal(y, x * TOP_K)


def dies_in_barrier(exchange: HostExchange) -> None:
    exchange.group.set_faults([Fault(1, "vote", "send_header", Action.KILL, epoch=2)])
    exchange.barrier()
    exchange.barrier()


def hangs(exchange: HostExchange, peer: Peer) -> None:
    """The loop of rank 1 comes to no vote before the others gave up; its heartbeat goes on."""
    exchange.barrier()
    if exchange.spec.rank == 1:
        peer.hear()
    try:
        exchange.all_gather(b"one")
    finally:
        peer.tell("ended")


def comes_late(exchange: HostExchange, peer: Peer) -> None:
    exchange.barrier()
    if exchange.spec.rank == 1:
        peer.hear()
    exchange.barrier()


def idles(exchange: HostExchange, peer: Peer) -> float:
    exchange.barrier()
    if exchange.spec.rank == 1:
        peer.hear()
        exchange.barrier()
        return 0.0
    before = time.process_time()
    exchange.barrier()
    return time.process_time() - before


def misses_hooks(exchange: HostExchange, view: str) -> None:
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


def back_to_back(exchange: HostExchange, rounds: int) -> None:
    """Ranks with no rows at all, others running ahead, over all banks many times."""
    for step in range(rounds):
        tokens = TOKENS if exchange.spec.rank == step % exchange.spec.num_ranks else 0
        operation(exchange, step, tokens) if tokens == 0 else lonely(exchange, step)


def lonely(exchange: HostExchange, step: int) -> None:
    x = rows_of(exchange.spec.rank, step)
    received = exchange.dispatch_send(
        x, torch.arange(TOP_K).repeat(TOKENS, 1), torch.ones(TOKENS, TOP_K)
    ).recv()
    assert torch.equal(exchange.combine_send(received.rows, received).recv(), x * TOP_K)


def interleaved(exchange: HostExchange, rounds: int) -> None:
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


def aborts_and_resets(exchange: HostExchange) -> int:
    operation(exchange, 0)
    if exchange.spec.rank == 0:
        threading.Thread(target=exchange.group.abort).start()
    with pytest.raises(GroupAborted, match="rank 0 aborted the group"):
        while True:
            exchange.barrier()
    with pytest.raises(GroupAborted):  # sticky
        operation(exchange, 1)
    exchange.group.reset()
    for step in range(9):
        operation(exchange, step)
    exchange.barrier()
    return exchange.group.native.generation


def masked_from_another_thread(exchange: HostExchange, peer: Peer) -> frozenset[int]:
    operation(exchange, 0)
    if exchange.spec.rank == 2:
        peer.hear()  # absent until the others have gone on without it
    else:
        timer = threading.Timer(0.3, exchange.group.mask, [[2]])
        timer.start()
        operation(exchange, 1)
        timer.join()
        assert exchange.group.masked == {2}
        operation(exchange, 2)
        peer.tell("done")
    exchange.group.reset()
    for step in range(5):
        operation(exchange, step)
    return exchange.group.masked


class Rung(Exception):
    """Raised by a signal handler."""


def ring(*_: object) -> None:
    raise Rung


def rings(exchange: HostExchange) -> None:
    """Once the main thread waits."""
    while not exchange.statistics()["counters"]["exchange_sleeps"]:
        os.sched_yield()
    os.kill(os.getpid(), signal.SIGALRM)


def interrupted(exchange: HostExchange, peer: Peer) -> None:
    if exchange.spec.rank == 0:
        signal.signal(signal.SIGALRM, ring)
        threading.Thread(target=rings, args=(exchange,)).start()
        with pytest.raises(Rung):
            exchange.barrier()
        peer.tell("interrupted")
    else:
        peer.hear()
        with pytest.raises(GroupAborted):
            exchange.barrier()


def second_thread(exchange: HostExchange, peer: Peer) -> str:
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


def waits_behind(exchange: HostExchange) -> None:
    """Rank 0 waits for 1, which waits for 2, which lives and does nothing; the deadline of 0 passes first."""
    rank, deadline = exchange.spec.rank, exchange.spec.timeout_ns / SECOND
    exchange.barrier()  # ranks that started late are waited for before any deadline counts
    exchange.group.set_faults((Fault(2, "dispatch", "send_header", Action.DROP, epoch=1, peer=1),))
    ids, weights = torch.arange(TOP_K).repeat(TOKENS, 1), torch.ones(TOKENS, TOP_K)
    pending = exchange.dispatch_send(rows_of(rank, 0), ids, weights)
    if rank == 1:
        time.sleep(deadline / 3)
    received = pending.recv()
    combining = exchange.combine_send(received.rows, received)
    if rank == 2:
        time.sleep(1.5 * deadline)  # what hangs
        return
    combining.recv()
