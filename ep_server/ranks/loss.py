"""Which rank of a group was lost, and why, told from the signs of its end.

One loss has many: what the rank says itself, its exit, channels that close, and the errors of those that
waited for it. Knows no process, channel or clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from ep_server.errors import ConfigError, EpServerError, StartupError


class Kind(IntEnum):
    """How much a sign explains, best first: the others follow from it."""

    OWN_ERROR = 0
    EXIT = 1  # without a word
    HOST = 2  # is gone
    PEER = 3  # a wait for one failed
    ABORT = 4  # by a peer
    CLOSED = 5  # channel


_ECHOES = {
    "PeerTimeout": Kind.PEER,
    "PeerLost": Kind.PEER,
    "ProtocolViolation": Kind.PEER,
    "GroupAborted": Kind.ABORT,
}


def kind_of(error_class: str) -> Kind:
    """Of the error that a rank ended with."""
    return _ECHOES.get(error_class, Kind.OWN_ERROR)


@dataclass(frozen=True, slots=True)
class Sign:
    """That a rank is lost. peer: for whom it waited in vain, where it says so."""

    kind: Kind
    rank: int
    error: EpServerError
    peer: int | None = None


def cause(signs: Sequence[Sign]) -> Sign:
    """The best of at least one sign; what a rank said explains its exit, whichever arrives first.

    Where ranks waited in vain, its rank is the one at the end of the chain of waits, not one that waited.
    """
    spoke = {sign.rank for sign in signs if sign.kind not in (Kind.EXIT, Kind.CLOSED)}
    unexplained = [sign for sign in signs if sign.kind is not Kind.EXIT or sign.rank not in spoke]
    best = min(unexplained, key=lambda sign: sign.kind)
    waits = {sign.rank: sign.peer for sign in signs if sign.kind is Kind.PEER and sign.peer is not None}
    if best.kind is not Kind.PEER or best.rank not in waits:
        return best
    end = _end_of(waits, best.rank)
    told = next((sign for sign in unexplained if sign.kind is Kind.PEER and sign.peer == end), best)
    return replace(told, rank=end)


def _end_of(waits: Mapping[int, int], rank: int) -> int:
    """Who is waited for, and waits for nobody; of ranks that wait in a ring, the last one met."""
    met = {rank}
    while (peer := waits.get(rank)) is not None and peer not in met:
        met.add(peer)
        rank = peer
    return rank


def start_error(sign: Sign, *, several: bool) -> StartupError:
    """What start() raises for it. several: hosts.

    Names the rank, but for a ConfigError on one host: all its ranks read the same configuration.
    """
    if isinstance(sign.error, ConfigError):
        return StartupError(f"rank {sign.rank}: {sign.error}") if several else sign.error
    kind = type(sign.error) if isinstance(sign.error, StartupError) else StartupError
    return kind(f"rank {sign.rank}: {sign.error}")
