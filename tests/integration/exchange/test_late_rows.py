"""A rank that stalled in combine_send, was masked and goes on must not touch rows of later operations."""

from __future__ import annotations

import pytest
import torch

from ep_server.exchange.api import Payload, Reduction
from ep_server.exchange.faults import Action, Fault
from ep_server.exchange.host import HostExchange
from tests.support.exchange.ranks import Peer, Ranks

BANKS = 2
SPEC = {
    "placement": (0, 1, 2),
    "max_tokens": 1,
    "hidden": 64,
    "top_k": 1,
    "payload": Payload.FP32,
    "num_banks": BANKS,
}
STALL = Fault(rank=2, op="combine", phase="send_rows", action=Action.DELAY, epoch=1, delay_ns=3_000_000_000)


def program(exchange: HostExchange, peer: Peer) -> list[float]:
    """Every token goes to rank 2 first and to rank 1 from then on; experts answer 10 * expert + step."""
    exchange.group.set_faults([STALL])
    results = []
    for step in range(BANKS + 1):
        expert = 2 if step == 0 else 1
        received = exchange.dispatch_send(
            torch.zeros(1, 64), torch.tensor([[expert]]), torch.ones(1, 1)
        ).recv()
        out = torch.full_like(received.rows, 10.0 * exchange.spec.rank + step)
        combine = exchange.combine_send(out, received)  # rank 2 wakes up in it when the bank is in use again
        if exchange.spec.rank == 2:
            peer.tell("written late")
            return []
        exchange.group.mask([2])
        if step == BANKS:
            peer.tell("bank in use again")
            peer.hear()
        results.append(float(combine.recv()[0, 0]))
    return results


@pytest.mark.parametrize("reduction", list(Reduction))
def test_late_rows_of_a_masked_rank_change_nothing(reduction: Reduction) -> None:
    with Ranks(program, 3, SPEC | {"reduction": reduction}) as ranks:
        for rank in (0, 1, 2):
            ranks.message(rank, timeout=60)
        for rank in (0, 1):
            ranks.tell(rank, "read")
        outcomes = ranks.join(60)
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.trace
        assert outcome.value == [0.0, 11.0, 12.0]
