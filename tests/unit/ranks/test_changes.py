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
        self.begun, self.go, self.error, self.applied = threading.Event(), threading.Event(), error, 0
        self.needs_idle, self.outlives_loss, self.what = True, False, "new weights from /there"
        if begin:
            self.go.set()

    def prepare(self) -> Prepared:
        self.begun.set()
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
    changes, change = Changes(), Scripted(begin=False)
    changes.prepare(1, 1, change)
    with pytest.raises(
        WrongState, match=r"it prepares new weights from /there \(change 1\).*try again after that"
    ):
        changes.prepare(2, 2, Scripted())
    change.go.set()
    assert not answer(changes).error
    with pytest.raises(WrongState, match=r"it has prepared new weights from /there \(change 1\)"):
        changes.prepare(2, 2, Scripted())


@pytest.mark.parametrize("ended", [True, False])
def test_a_dropped_change_is_never_applied(ended: bool) -> None:
    changes, change = Changes(), Scripted(begin=ended)
    changes.prepare(1, 1, change)
    if ended:
        answer(changes)
    changes.drop(7)  # unknown
    changes.drop(1)
    if not ended:
        change.go.set()
        assert answer(changes) == OrderDone(1, error="change 1 was dropped")
    with pytest.raises(WrongState, match="change 1 is not prepared"):
        changes.offer(1, 3)
    assert change.applied == 0 and changes.offered == 0
    changes.prepare(2, 2, Scripted())
    assert not answer(changes).error


def test_a_change_waits_for_what_prepares_a_dropped_one() -> None:
    """It is not refused: only the rank knows when that has ended. A dropped one that waits begins never."""
    changes, made = Changes(), [Scripted(begin=number > 1) for number in range(4)]
    for number in (1, 2, 3):
        changes.prepare(number, number, made[number])
        assert made[1].begun.wait(60)
        if number < 3:
            changes.drop(number)
    assert changes.preparing and changes.finished() is None
    made[1].go.set()
    assert answer(changes) == OrderDone(3, nbytes=10, rate=2.0)
    assert not made[2].begun.is_set()
    changes.offer(3, 4)
    changes.apply(3, 0)
    assert [change.applied for change in made] == [0, 0, 0, 1]


def test_a_change_that_is_dropped_as_it_waits_is_answered() -> None:
    changes, first = Changes(), Scripted(begin=False)
    changes.prepare(1, 1, first)
    changes.drop(1)
    changes.prepare(2, 2, Scripted())
    changes.drop(2)
    assert answer(changes) == OrderDone(2, error="change 2 was dropped")
    first.go.set()


def test_a_switch_that_was_not_offered_is_a_bug() -> None:
    changes = Changes()
    with pytest.raises(InternalError, match="switched to change 3, which this rank did not offer"):
        changes.apply(3, 0)
