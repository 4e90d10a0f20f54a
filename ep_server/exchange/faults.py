"""Injected faults, as records: delay, drop or kill at one phase of one operation of one rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from ep_server import _C
from ep_server.errors import InvalidArgument
from ep_server.exchange.api import ExchangeSpec


class Action(StrEnum):
    """What happens. The order is that of csrc/exchange/common/faults.hpp."""

    DELAY = "delay"
    DROP = "drop"  # the cell of phase send_header or recv_consumed is not written
    KILL = "kill"  # SIGKILL to this process


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    rank: that it affects. All ranks may get the same plan.
    op: dispatch, combine or vote. phase: one of `_C.PHASES`; at send_rows half of the rows are written.
    epoch: of the operation, counted from 1; 0 = every one.
    peer: DROP only, the rank whose cell is not written; -1 = no rank gets one.
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


PHASES = ("send_header", "send_rows")


def encode_device_faults(faults: Iterable[Fault], spec: ExchangeSpec) -> list[tuple[int, int, int, int, int]]:
    """(op, phase, bits of the peers without a cell, epoch, ns) of each fault of this rank.

    Raises: InvalidArgument for an operation, phase or action that kernels do not have.
    """
    given = list(faults)
    for fault in given:
        if fault.op not in {"dispatch", "combine"}:
            raise InvalidArgument("op", fault.op, "dispatch or combine on GPUs")
        if fault.phase not in PHASES:
            raise InvalidArgument("phase", fault.phase, "one of " + ", ".join(PHASES) + " on GPUs")
        if fault.action == Action.KILL:
            raise InvalidArgument("action", str(fault.action), "delay or drop on GPUs")
    drop, encoded = tuple(Action).index(Action.DROP), []
    for op, phase, action, epoch, peer, delay_ns in encode_faults(given, spec.rank):
        everyone = (1 << spec.num_ranks) - 1
        drops = 0 if action != drop else everyone if peer < 0 else 1 << peer
        encoded.append((op, phase, drops, epoch, delay_ns))
    return encoded
