"""Which rank of a group was lost, and why, told from the signs of its end.

One loss has many: what the rank says itself, its exit, channels that close, and the errors of those that
waited for it. Knows no process, channel or clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """That a rank is lost."""

    kind: Kind
    rank: int
    error: EpServerError


def cause(signs: Sequence[Sign]) -> Sign:
    """The best of at least one sign; what a rank said explains its exit, whichever arrives first."""
    spoke = {sign.rank for sign in signs if sign.kind not in (Kind.EXIT, Kind.CLOSED)}
    unexplained = (sign for sign in signs if sign.kind is not Kind.EXIT or sign.rank not in spoke)
    return min(unexplained, key=lambda sign: sign.kind)


def start_error(sign: Sign, *, several: bool) -> StartupError:
    """What start() raises for it. several: hosts.

    Names the rank, but for a ConfigError on one host: all its ranks read the same configuration.
    """
    if isinstance(sign.error, ConfigError):
        return StartupError(f"rank {sign.rank}: {sign.error}") if several else sign.error
    kind = type(sign.error) if isinstance(sign.error, StartupError) else StartupError
    return kind(f"rank {sign.rank}: {sign.error}")
