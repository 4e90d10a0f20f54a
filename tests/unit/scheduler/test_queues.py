"""The waiting queue alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep_server.errors import InternalError
from ep_server.scheduler.queues import WaitingQueue
from ep_server.scheduler.sequence import ScheduledSequence
from tests.support.ranks.simulated_rank import make_request


def sequence(arrival: int, priority: int = 0, *, urgent: bool = False, size: int = 0) -> ScheduledSequence:
    seq = ScheduledSequence(make_request(arrival, [1], priority=priority), arrival, 4, caches=True, size=size)
    seq.urgent = urgent
    return seq


def queue_of(*sequences: ScheduledSequence, max_overtakes: int = 100) -> WaitingQueue:
    queue = WaitingQueue(max_overtakes)
    for seq in sequences:
        queue.push(seq)
    queue.check_integrity()
    return queue


def taken(queue: WaitingQueue) -> list[int]:
    order = []
    while queue.head is not None:
        head = queue.head
        assert queue.take() is head
        queue.check_integrity()
        order.append(head.arrival)
    assert len(queue) == 0
    return order


def test_urgent_requests_come_first_in_arrival_order():
    queue = queue_of(
        sequence(0, 9), sequence(3, 5, urgent=True), sequence(1, -5, urgent=True), sequence(2, 20)
    )
    assert taken(queue) == [1, 3, 2, 0]


def test_shorter_prompts_of_a_priority_come_first():
    queue = queue_of(sequence(0, size=3), sequence(1, size=1), sequence(2), sequence(3, 1, size=9))
    assert taken(queue) == [3, 2, 1, 0]


def test_nobody_of_its_priority_passes_one_that_did_not_fit():
    queue = queue_of(sequence(0, size=3), max_overtakes=1)
    queue.refuse()
    queue.refuse()
    queue.push(sequence(1))
    queue.push(sequence(2, 1))
    queue.check_integrity()
    assert taken(queue) == [2, 0, 1]


def test_a_preempted_one_comes_back_at_its_old_place():
    queue = queue_of(*(sequence(n) for n in range(4)))
    first, second = queue.take(), queue.take()
    queue.push(second)
    queue.push(first)
    assert taken(queue) == [0, 1, 2, 3]


@given(st.lists(st.integers(-2, 2), max_size=12), st.data())
def test_any_one_can_be_removed(priorities, data):
    sequences = [sequence(n, priority) for n, priority in enumerate(priorities)]
    queue = queue_of(*sequences)
    gone = data.draw(st.sets(st.sampled_from(sequences))) if sequences else set()
    for seq in gone:
        queue.remove(seq)
        queue.check_integrity()
        with pytest.raises(InternalError, match="is not in the waiting queue"):
            queue.remove(seq)
    kept = [seq for seq in sequences if seq not in gone]
    assert taken(queue) == [
        seq.arrival for seq in sorted(kept, key=lambda s: (-s.request.priority, s.arrival))
    ]


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_the_oldest_lets_so_many_pass(limit):
    queue = queue_of(sequence(0, -1), *(sequence(n) for n in range(1, 9)), max_overtakes=limit)
    assert taken(queue).index(0) == limit


def test_only_later_ones_count_as_overtaking():
    queue = queue_of(sequence(2, -1), max_overtakes=1)
    for arrival in (0, 1):  # older ones that were preempted
        queue.push(sequence(arrival, 1))
    assert taken(queue) == [0, 1, 2]
    assert not queue_of(sequence(5)).take().urgent
