"""Faults on purpose as the kernels understand them: delays and drops where a send writes."""

from __future__ import annotations

from collections.abc import Iterable

from ep_server.errors import InvalidArgument
from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.faults import Action, Fault, encode_faults

PHASES = ("send_header", "send_rows")


def encode_device_faults(faults: Iterable[Fault], spec: ExchangeSpec) -> list[tuple[int, int, int, int, int]]:
    """(op, phase, bits of the peers that get nothing, epoch, ns) of each fault of this rank.

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
