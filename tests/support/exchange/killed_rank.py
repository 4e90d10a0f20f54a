"""A rank on a GPU is killed in the middle of a dispatch, and what its peers must say. Needs no GPU itself."""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing.reduction import DupFd
from typing import Any

from ep_server import _C
from ep_server.exchange.api import ExchangeSpec, Payload, Reduction
from ep_server.exchange.faults import Action, Fault
from ep_server.exchange.segment import create_segment, report_lost
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


LOST = 1


class Segment:
    """The memory that ranks share, before a process opens its end of it. number: of the process."""

    def __init__(self, fd: int, number: int = -1) -> None:
        self.fd, self.number = fd, number

    def __reduce__(self) -> tuple[Any, ...]:
        return _detach, (DupFd(self.fd),)

    def open(self, spec: ExchangeSpec, **_: Any) -> Any:
        return Segment(self.fd, spec.rank)

    def close(self) -> None:
        os.close(self.fd)


def _detach(handle: Any) -> Segment:
    return Segment(int(handle.detach()))


def replaced_spec(rank: int, num_ranks: int) -> ExchangeSpec:
    """Its deadline is longer than the test: only an abort ends a wait."""
    share = tuple(e * num_ranks // 16 for e in range(16))
    spec = ExchangeSpec(rank, num_ranks, share, 8, 512, 4, Payload.BF16, Reduction.RANK, num_banks=2)
    return replace(spec, timeout_ns=600 * SECOND)


def abort_lost(segment: int) -> None:
    """As a rank does whose wait for the lost one has timed out: it aborts the group there too."""
    group = _C.Segment(segment)
    at = next(begin for name, begin, _ in _C.Layout(group.geometry).regions() if name == "abort")
    writer, generation = 0, 0
    cell = struct.pack("<II", generation + 1, writer + 1)
    assert os.pwrite(segment, cell, group.regions[LOST] + at) == len(cell)


def check_replaced(program: Callable[..., Any], num_ranks: int, *args: Any) -> None:
    """Kills rank 1 while the others wait for it in a kernel, and puts another process in its place.

    Args:
        program: of a process: (segment, *args, peer); the last process is the successor of rank 1.
    """
    fields = asdict(replaced_spec(0, num_ranks))
    kwargs = {field: value for field, value in fields.items() if field not in {"rank", "num_ranks"}}
    fd = create_segment(control_spec(replaced_spec(0, num_ranks)))
    others = [rank for rank in range(num_ranks) if rank != LOST]
    try:
        with Ranks(program, num_ranks + 1, kwargs, args=args, ends=[Segment(fd)] * (num_ranks + 1)) as ranks:
            for rank in range(num_ranks):
                assert ranks.message(rank, 120) == "waits"
            ranks.kill(LOST)
            ranks.processes[LOST].join(30)
            abort_lost(fd)
            for rank in others:
                ranks.tell(rank, "go on")
            ranks.tell(num_ranks, "start")
            time.sleep(0.5)  # kernels wait by now; nothing on the host can tell
            reported = time.monotonic()
            report_lost(fd, LOST, 0)
            for rank in others:
                assert ranks.message(rank, 60) == "ended"
            assert ranks.message(num_ranks, 120) == "ready"
            for rank in others:
                ranks.tell(rank, reported)
            ranks.tell(num_ranks, "join")
            ended = ranks.join(120)
    finally:
        os.close(fd)
    for rank in (*others, num_ranks):
        assert ended[rank].error is None, f"process {rank}: {ended[rank].trace}"
    print("waits ended after", [f"{ended[rank].value:.4f} s" for rank in others])
    assert all(ended[rank].value < 30 for rank in others), "the deadline is ten minutes"


def check_grown(program: Callable[..., Any], num_ranks: int, *args: Any) -> None:
    """Ranks start without rank 1, which comes and leaves. program: as for check_replaced()."""
    fields = asdict(replaced_spec(0, num_ranks))
    kwargs = {field: value for field, value in fields.items() if field not in {"rank", "num_ranks"}}
    fd = create_segment(control_spec(replaced_spec(0, num_ranks)))
    others = [rank for rank in range(num_ranks) if rank != LOST]
    try:
        with Ranks(program, num_ranks, kwargs, args=args, ends=[Segment(fd)] * num_ranks) as ranks:
            for rank in others:
                assert ranks.message(rank, 120) == "serves"
            ranks.tell(LOST, "start")
            assert ranks.message(LOST, 120) == "ready"
            for rank in range(num_ranks):
                ranks.tell(rank, "regroup")
            ended = ranks.join(120)
    finally:
        os.close(fd)
    for rank in range(num_ranks):
        assert ended[rank].error is None, f"rank {rank}: {ended[rank].trace}"
