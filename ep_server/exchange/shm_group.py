"""One rank's end of a group in host memory: votes, membership, what went wrong, measurements.

Knows no operation: native.py has them. Durations in ns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from ep_server import _C
from ep_server.errors import InvalidArgument
from ep_server.exchange.api import ExchangeSpec, ExchangeStatistics, Membership
from ep_server.exchange.faults import Fault, encode_faults


class ShmGroup:
    """What ShmExchange is without its operations.

    Args:
        native: the end of csrc.
    """

    def __init__(self, spec: ExchangeSpec, native: _C.Exchange) -> None:
        self.spec = spec
        self._native: _C.Exchange | None = native

    def all_gather(self, record: bytes) -> list[bytes]:
        """As the Protocol says; a masked rank's record is empty."""
        return self._open().all_gather(record, self.spec.timeout_ns)

    def barrier(self) -> None:
        """As the Protocol says. Waits while every peer's heartbeat goes on: ranks meet here after loading."""
        self._open().all_gather(b"")

    # -- membership, failure, measurement -------------------------------------------------------------

    @property
    def membership(self) -> Membership:
        """As the Protocol says."""
        return self

    @property
    def masked(self) -> frozenset[int]:
        """Ranks that this one neither writes to nor waits for."""
        bits = self._open().masked
        return frozenset(r for r in range(self.spec.num_ranks) if bits >> r & 1)

    def mask(self, ranks: Iterable[int]) -> None:
        """Stops talking to these ranks, also in a wait in progress in another thread. Local to this rank."""
        self._open().mask(self._bits(ranks))

    def reset(self, dead: Iterable[int] = ()) -> None:
        """Starts a new generation: no abort, no operation in flight, no mask but `dead`. Collective.

        All ranks outside `dead` call it with the same `dead`. Pending operations and views are dropped.
        Raises: PeerTimeout("reset", ...), which aborts nobody: call again once the rank is there.
        """
        self._open().reset(self._bits(dead))

    def abort(self) -> None:
        """Ends every wait of the group with GroupAborted until reset(). Any thread may call it."""
        self._open().abort()

    def check(self) -> None:
        """Does nothing: on the CPU, the call that finds a failure raises it."""

    def set_faults(self, faults: Iterable[Fault]) -> None:
        """Replaces the fault plan; faults of other ranks are ignored."""
        self._open().set_faults(encode_faults(faults, self.spec.rank))

    def statistics(self) -> ExchangeStatistics:
        """As the Protocol says."""
        return cast("ExchangeStatistics", self._open().statistics())

    # -- inside ---------------------------------------------------------------------------------------

    def _open(self) -> _C.Exchange:
        if self._native is None:
            raise InvalidArgument("exchange", "closed", "open")
        return self._native

    def _bits(self, ranks: Iterable[int]) -> int:
        bits = 0
        for rank in ranks:
            if not 0 <= rank < self.spec.num_ranks or rank == self.spec.rank:
                raise InvalidArgument("ranks", rank, f"0 to {self.spec.num_ranks - 1}, not this rank itself")
            bits |= 1 << rank
        return bits
