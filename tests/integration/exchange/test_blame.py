"""Whom an error names: the end of a chain of waits, and where there is none, a rank of the ring."""

from __future__ import annotations

import time

import pytest
import torch

from ep_server.errors import GroupAborted, PeerTimeout
from ep_server.exchange.faults import Action, Fault
from ep_server.exchange.shm import NativeExchange
from tests.integration.exchange.test_faults import (
    SECOND,
    TOKENS,
    TOP_K,
    assert_noticed,
    operation,
    rows_of,
    spec_of,
)
from tests.support.exchange.ranks import run_outcomes


def waits_behind(exchange: NativeExchange) -> None:
    """Rank 0 waits for 1, which waits for 2, which lives and does nothing; the deadline of 0 passes first."""
    rank, deadline = exchange.spec.rank, exchange.spec.timeout_ns / SECOND
    exchange.set_faults((Fault(2, "dispatch", "send_header", Action.DROP, epoch=1, peer=1),))
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


def test_who_waits_behind_another_rank_names_the_one_that_hangs() -> None:
    ended = run_outcomes(waits_behind, 3, spec_of(3, 3 * SECOND), 30)
    assert_noticed([ended[0]], "combine", "recv_header", 2)
    assert isinstance(ended[0].error, PeerTimeout)
    assert isinstance(ended[1].error, GroupAborted)


def unheard(rank: int, peer: int) -> Fault:
    return Fault(rank, "dispatch", "send_header", Action.DROP, epoch=1, peer=peer)


def once(exchange: NativeExchange, faults: tuple[Fault, ...]) -> None:
    exchange.set_faults(faults)
    operation(exchange, 0)


@pytest.mark.parametrize("ring", [(0, 1), (0, 1, 2)], ids=len)
def test_ranks_waiting_in_a_ring_never_name_themselves(ring: tuple[int, ...]) -> None:
    """Each misses the header of the next one; whoever is outside misses none, and waits for their answers."""
    faults = tuple(unheard(ring[(i + 1) % len(ring)], rank) for i, rank in enumerate(ring))
    ended = run_outcomes(once, 3, spec_of(3, 3 * SECOND), 30, args=(faults,))
    errors = [outcome.error for outcome in ended]
    assert any(isinstance(error, PeerTimeout) for error in errors), ended
    for rank, error in enumerate(errors):
        assert isinstance(error, PeerTimeout | GroupAborted), ended[rank]
        if isinstance(error, PeerTimeout):
            assert error.rank == rank and error.peer != rank and error.peer in ring
