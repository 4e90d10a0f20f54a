"""A change of one rank: prepared beside its steps, then switched to, refused or dropped."""

from __future__ import annotations

import threading
import time

import pytest

from ep_server.errors import CheckpointError, InternalError, WrongState
from ep_server.orders import OrderDone
from ep_server.ranks.changes import Changes, Prepared


class Scripted:
    """A change that is prepared once `go` is set, and counts how often it is applied."""

    def __init__(self, error: Exception | None = None, *, begin: bool = True) -> None:
        self.go, self.error, self.applied = threading.Event(), error, 0
        self.needs_idle, self.outlives_loss = True, False
        if begin:
            self.go.set()

    def prepare(self) -> Prepared:
        assert self.go.wait(60)
        if self.error is not None:
            raise self.error
        return Prepared(nbytes=10, rate=2.0)

    def apply(self) -> None:
        self.applied += 1


def answer(changes: Changes) -> OrderDone:
    """What prepare() is answered with, once its thread has ended."""
    deadline = time.monotonic() + 60
    while (done := changes.finished()) is None:
        assert time.monotonic() < deadline and changes.preparing
        time.sleep(0.001)
    assert not changes.preparing and changes.finished() is None
    return done


def test_a_change_is_offered_only_when_the_front_says_so() -> None:
    changes, change = Changes(lambda: 3_000_000_000), Scripted(begin=False)
    changes.prepare(4, 1, change)
    assert changes.preparing and changes.finished() is None and changes.offered == 0 and changes.needs_idle
    with pytest.raises(WrongState, match="change 4 is not prepared"):
        changes.offer(4, 2)
    change.go.set()
    assert answer(changes) == OrderDone(1, nbytes=10, rate=2.0)
    assert changes.offered == 0
    with pytest.raises(WrongState, match="change 5 is not prepared"):
        changes.offer(5, 2)
    changes.offer(4, 2)
    assert changes.offered == 4 and change.applied == 0
    changes.drop(4)  # too late
    assert changes.apply(4, 1_000_000_000) == OrderDone(2, seconds=2.0)
    assert change.applied == 1 and changes.offered == 0 and not changes.needs_idle
    changes.prepare(5, 3, Scripted())
    assert answer(changes) == OrderDone(3, nbytes=10, rate=2.0)


def test_a_refused_change_leaves_room_for_the_next() -> None:
    changes, change = Changes(), Scripted(CheckpointError("norm.weight: expected [2],\nfound [3]"))
    changes.prepare(1, 1, change)
    assert answer(changes) == OrderDone(1, error="norm.weight: expected [2], found [3]")
    changes.prepare(2, 2, Scripted())
    assert not answer(changes).error and change.applied == 0


def test_a_second_change_is_refused() -> None:
    changes = Changes()
    changes.prepare(1, 1, Scripted())
    with pytest.raises(WrongState, match="change 1 is in the making"):
        changes.prepare(2, 2, Scripted())
    assert not answer(changes).error


@pytest.mark.parametrize("ended", [True, False])
def test_a_dropped_change_is_never_applied(ended: bool) -> None:
    changes, change = Changes(), Scripted(begin=ended)
    changes.prepare(1, 1, change)
    if ended:
        answer(changes)
    changes.drop(7)  # unknown
    changes.drop(1)
    if not ended:
        with pytest.raises(WrongState, match="change 1 was dropped but is not at its end"):
            changes.prepare(2, 2, Scripted())
        change.go.set()
        assert answer(changes) == OrderDone(1, error="change 1 was dropped")
    with pytest.raises(WrongState, match="change 1 is not prepared"):
        changes.offer(1, 3)
    assert change.applied == 0 and changes.offered == 0
    changes.prepare(2, 2, Scripted())
    assert not answer(changes).error


def test_a_switch_that_was_not_offered_is_a_bug() -> None:
    changes = Changes()
    with pytest.raises(InternalError, match="switched to change 3, which this rank did not offer"):
        changes.apply(3, 0)
