"""A rank on a GPU is killed in the middle of a dispatch, and what its peers must say. Needs no GPU itself."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ep_server.exchange.api import ExchangeSpec, Payload
from ep_server.exchange.faults import Action, Fault
from ep_server.exchange.spec import control_spec
from tests.support.exchange.ranks import Ranks

SECOND = 1_000_000_000
EXPERTS = 64
EPOCH = 3  # of the dispatch in which it dies
DELAY = Fault(1, "dispatch", "send_rows", Action.DELAY, epoch=EPOCH, delay_ns=60 * SECOND)
DROP = Fault(1, "dispatch", "send_rows", Action.DROP, epoch=EPOCH)


@dataclass(frozen=True)
class Death:
    """How far rank 1 comes. num_sms: 0 = all."""

    faults: tuple[Fault, ...]
    tokens: int = 4
    num_sms: int = 0


DEATHS = {
    "header_without_rows": Death((DROP,)),
    # A row has two blocks at this size, of which every second is held: its entries come, its end does not.
    "half_of_each_row": Death((DELAY,)),
    # Four blocks take 64 tokens in turn.
    "half_of_the_rows": Death((DELAY,), tokens=64, num_sms=1),
    "while_it_waits": Death(()),
}


def killed_spec(rank: int, num_ranks: int, death: Death) -> ExchangeSpec:
    """Rank 1 does not give up before it is killed: that would end the others' waits."""
    timeout_ns = 60 * SECOND if rank == 1 else 3 * SECOND
    share = tuple(e * num_ranks // EXPERTS for e in range(EXPERTS))
    spec = ExchangeSpec(rank, num_ranks, share, death.tokens, 2048, 8, Payload.BF16, num_banks=2)
    return replace(spec, timeout_ns=timeout_ns)


def check_killed(
    program: Callable[..., Any], num_ranks: int, name: str, on_timeout: str, first: tuple[Any, ...] = ()
) -> None:
    """Runs `program` on all ranks, kills rank 1 in its dispatch, and looks at what the others found.

    Args:
        program: of a rank: (control, *first, name, on_timeout, peer) -> what it found, seconds.
    """
    fields = asdict(control_spec(killed_spec(0, num_ranks, DEATHS[name])))
    kwargs = {field: value for field, value in fields.items() if field not in {"rank", "num_ranks"}}
    with Ranks(program, num_ranks, kwargs, args=(*first, name, on_timeout)) as ranks:
        ranks.message(1, 60)
        ranks.kill(1)
        ranks.processes[1].join(30)
        survivors = [rank for rank in range(num_ranks) if rank != 1]
        for rank in survivors:
            ranks.tell(rank, "rank 1 is dead")
        ended = ranks.join(60)
    assert ended[1].exitcode == -signal.SIGKILL
    for rank in survivors:
        assert ended[rank].error is None, f"rank {rank}: {ended[rank].trace}"
    found = [ended[rank].value[0] for rank in survivors]
    if on_timeout == "raise":
        named = f"{'combine' if name == 'while_it_waits' else 'dispatch'}/recv_header of 1"
        assert set(found) <= {named, "GroupAborted"}, found
        assert named in found, found
    assert all(ended[rank].value[1] < 10 for rank in survivors), "the deadline is three seconds"
