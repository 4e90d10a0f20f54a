"""Whom an error names: the end of a chain of waits, and where there is none, a rank of the ring."""

from __future__ import annotations

import pytest

from ep_server.errors import GroupAborted, PeerTimeout
from ep_server.exchange.faults import Action, Fault
from ep_server.exchange.host import HostExchange
from tests.support.exchange.fault_programs import (
    SECOND,
    assert_noticed,
    operation,
    spec_of,
    waits_behind,
)
from tests.support.exchange.ranks import run_outcomes


def test_who_waits_behind_another_rank_names_the_one_that_hangs() -> None:
    ended = run_outcomes(waits_behind, 3, spec_of(3, 3 * SECOND), 30)
    assert_noticed([ended[0]], "combine", "recv_header", 2)
    assert isinstance(ended[0].error, PeerTimeout)
    assert isinstance(ended[1].error, GroupAborted)


def unheard(rank: int, peer: int) -> Fault:
    return Fault(rank, "dispatch", "send_header", Action.DROP, epoch=1, peer=peer)


def once(exchange: HostExchange, faults: tuple[Fault, ...]) -> None:
    exchange.barrier()  # ranks that started late are waited for before any deadline counts
    exchange.group.set_faults(faults)
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
