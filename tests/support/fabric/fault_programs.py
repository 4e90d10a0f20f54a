"""What ranks on a network run in tests of faults, and what their errors must say."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from ep_server.errors import GroupAborted, PeerLost, PeerTimeout
from ep_server.exchange.fabric.settings import FabricOptions
from ep_server.exchange.host import HostExchange
from ep_server.testing import namespaces
from ep_server.testing.namespaces import Hosts
from tests.support.exchange.fault_programs import SECOND, operation
from tests.support.exchange.ranks import Outcome, Peer
from tests.support.fabric.fabric_ends import LIBRARIES, FabricEnd


class AnotherLost(AssertionError):
    """A rank was given up that lived. See patiently()."""


def patiently(attempt: Callable[[Path, int], None], folder: Path, seconds: float = 1.0) -> None:
    """Attempts a test whose deadline is so short that a busy machine may hold a rank up for as long.

    If another rank than the lost one was given up, and only then, the deadline of a second attempt is one
    that no rank misses. attempt: takes an empty folder and the deadline in nanoseconds.
    """
    first, second = folder / "first", folder / "second"
    first.mkdir()
    try:
        attempt(first, int(seconds * SECOND))
    except AnotherLost:
        second.mkdir()
        attempt(second, 12 * SECOND)


def assert_only(lost: Collection[int], ended: list[Outcome]) -> None:
    """Whoever names a rank names one of these. Raises AnotherLost."""
    for outcome in ended:
        if isinstance(outcome.error, PeerTimeout | PeerLost) and outcome.error.peer not in lost:
            raise AnotherLost(outcome)


def assert_lost(survivors: list[Outcome], peer: int) -> None:
    """Every survivor names the peer; somebody noticed it by himself."""
    assert_only([peer], survivors)
    for outcome in survivors:
        assert isinstance(outcome.error, PeerTimeout | PeerLost), outcome
    assert any(o.error.rank == o.rank for o in survivors if isinstance(o.error, PeerTimeout | PeerLost))


def never_ends(exchange: HostExchange, peer: Peer) -> None:
    exchange.barrier()  # ranks that started late are waited for before any deadline counts
    peer.tell("started")
    for step in range(1 << 30):
        operation(exchange, step)


def one_each(hosts: Hosts, folder: Path, library: str = "system") -> list[FabricEnd]:
    """One rank per host, found by capability: the only network there is the host's own."""
    options = FabricOptions(library=LIBRARIES[library], domain=namespaces.DEVICE)
    return [FabricEnd(str(folder / "meeting"), options, name) for name in hosts.names]


def goes_on(exchange: HostExchange, peer: Peer) -> None:
    exchange.barrier()  # as above
    operation(exchange, 0)
    peer.tell("started")
    for step in range(1, 1 << 30):
        operation(exchange, step)


def resets(exchange: HostExchange, turns: int) -> int:
    """Operations are under way whenever a rank aborts; those after the reset see only their own rows."""
    for turn in range(turns):
        with pytest.raises(GroupAborted):
            for step in range(1 << 20):
                if step == 3 and exchange.spec.rank == turn % exchange.spec.num_ranks:
                    threading.Thread(target=exchange.group.abort).start()
                operation(exchange, 10 * turn + step)
        exchange.group.reset()
    operation(exchange, 0)
    return int(exchange.group.native.generation)  # type: ignore[union-attr]
