"""Faults on purpose, as records: delay, drop or kill at one phase of one operation of one rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from ep_server import _C
from ep_server.errors import InvalidArgument


class Action(StrEnum):
    """What happens. The order is that of csrc/exchange/common/faults.hpp."""

    DELAY = "delay"
    DROP = "drop"  # the cell of phase send_header or recv_consumed is not written
    KILL = "kill"  # SIGKILL to this process


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    rank: who suffers it; plans may be given to all ranks alike.
    op: dispatch, combine or vote. phase: one of `_C.PHASES`; at send_rows half of the rows are written.
    epoch: of the operation, counted from 1; 0 = every one.
    peer: DROP only, whose cell is not written; -1 = nobody gets one.
    """

    rank: int
    op: str
    phase: str
    action: Action
    epoch: int = 0
    peer: int = -1
    delay_ns: int = 0


def encode_faults(faults: Iterable[Fault], rank: int) -> list[tuple[int, int, int, int, int, int]]:
    """The faults of one rank in the native form. Raises InvalidArgument for an unknown op or phase."""
    encoded = []
    for fault in faults:
        if fault.op not in _C.OPS:
            raise InvalidArgument("op", fault.op, "one of " + ", ".join(_C.OPS))
        if fault.phase not in _C.PHASES:
            raise InvalidArgument("phase", fault.phase, "one of " + ", ".join(_C.PHASES))
        if fault.rank == rank:
            action = tuple(Action).index(Action(fault.action))
            encoded.append(
                (
                    _C.OPS.index(fault.op),
                    _C.PHASES.index(fault.phase),
                    action,
                    fault.epoch,
                    fault.peer,
                    fault.delay_ns,
                )
            )
    return encoded
