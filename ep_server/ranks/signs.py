"""Signs that a rank is lost, and which rank they mean. Data and rules only."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from ep_server.errors import ConfigError, EpServerError, StartupError
from ep_server.records import LossCause


class Kind(IntEnum):
    """Kinds of signs, the most telling first: a loss of one kind causes those after it."""

    OWN_ERROR = 0
    EXIT = 1  # without a message
    HOST = 2  # host lost
    PEER = 3  # waiting for a peer failed
    ABORT = 4  # a peer aborted the group
    CLOSED = 5  # channel closed


LOSS_SECONDS = 600.0
_ECHOES = {
    "PeerTimeout": Kind.PEER,
    "PeerLost": Kind.PEER,
    "ProtocolViolation": Kind.PEER,
    "GroupAborted": Kind.ABORT,
}


# What torch and the native modules write: "CUDA error: ...", "CUDA out of memory", "torch.AcceleratorError".
_CUDA = re.compile(r"\bCUDA\b|AcceleratorError|\bcu(BLAS|DNN)\b", re.IGNORECASE)


def kind_of(error_class: str) -> Kind:
    """The kind of sign of an error that a rank ended with."""
    return _ECHOES.get(error_class, Kind.OWN_ERROR)


@dataclass(frozen=True, slots=True)
class Sign:
    """Evidence that a rank is lost.

    peer: the rank it waited for in vain, if it named one. killed: EXIT only: by a signal.
    """

    kind: Kind
    rank: int
    error: EpServerError
    peer: int | None = None
    killed: bool = False

    @property
    def plain(self) -> bool:
        """No other loss explains it."""
        return self.kind in (Kind.OWN_ERROR, Kind.HOST) or (self.kind is Kind.EXIT and self.killed)


def cause(signs: Sequence[Sign]) -> Sign:
    """The most telling of at least one sign. A rank's message explains its exit, whichever arrives first.

    Where ranks waited in vain, the culprit is the rank at the end of the chain of waits, not one that waited.
    """
    spoke = {sign.rank for sign in signs if sign.kind not in (Kind.EXIT, Kind.CLOSED)}
    unexplained = [sign for sign in signs if sign.kind is not Kind.EXIT or sign.rank not in spoke]
    best = min(unexplained, key=lambda sign: sign.kind)
    waits = {sign.rank: sign.peer for sign in signs if sign.kind is Kind.PEER and sign.peer is not None}
    if best.kind is not Kind.PEER or best.rank not in waits:
        return best
    end = _end_of(waits, best.rank)
    reported = next((sign for sign in unexplained if sign.kind is Kind.PEER and sign.peer == end), best)
    return replace(reported, rank=end)


def lost_ranks(signs: Sequence[Sign]) -> frozenset[int]:
    """The ranks that have ended or must be ended; the others can go on."""
    ended = {sign.rank for sign in signs if sign.kind in (Kind.OWN_ERROR, Kind.EXIT, Kind.CLOSED)}
    return frozenset(ended | ({cause(signs).rank} if signs else set()))


def loss_cause(signs: Sequence[Sign], rank: int) -> LossCause:
    """Why one of lost_ranks() is lost. A process that has ended leaves a sign other than CLOSED."""
    own = [sign for sign in signs if sign.rank == rank and sign.kind not in (Kind.PEER, Kind.ABORT)]
    best = min(own, key=lambda sign: sign.kind, default=None)
    if best is None or best.kind is Kind.CLOSED:
        return LossCause.HANG
    if best.kind is Kind.HOST:
        return LossCause.NODE
    if best.kind is Kind.EXIT:
        return LossCause.SIGNAL if best.killed else LossCause.EXIT
    return LossCause.CUDA if _CUDA.search(str(best.error)) else LossCause.EXCEPTION


def _end_of(waits: Mapping[int, int], rank: int) -> int:
    """The rank that others wait for and that waits for none; in a ring of waits, the last one visited."""
    visited = {rank}
    while (peer := waits.get(rank)) is not None and peer not in visited:
        visited.add(peer)
        rank = peer
    return rank


def start_error(sign: Sign, *, several: bool) -> StartupError:
    """The error that start() raises for a sign. several: whether the group has several hosts.

    Names the rank, except for a ConfigError on one host, where all ranks read the same configuration.
    """
    if isinstance(sign.error, ConfigError):
        return StartupError(f"rank {sign.rank}: {sign.error}") if several else sign.error
    kind = type(sign.error) if isinstance(sign.error, StartupError) else StartupError
    return kind(f"rank {sign.rank}: {sign.error}")


class LossCount:
    """Losses of each rank, to find one that fails again and again.

    most: within ten minutes, from which on it does; 0 = no number is too many.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._lost_at: dict[int, list[float]] = {}

    def too_often(self, rank: int) -> str:
        """Counts a loss. Returns: why the rank had better stay out, "" if it need not."""
        now = self._clock()
        recent = [at for at in self._lost_at.get(rank, []) if now - at < LOSS_SECONDS]
        recent = self._lost_at[rank] = [*recent, now]
        often = 0 < self._most <= len(recent)
        return f"lost {len(recent)} times within {LOSS_SECONDS:.0f} s" if often else ""
