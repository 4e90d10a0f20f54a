"""How many may come in, and what the others are told."""

from __future__ import annotations

import pytest

from ep_server.admission import Admission, AdmissionLimits
from ep_server.errors import QueueFull


def admission(ranks: int = 2, running: int = 3, queue: int = 4, streams: int = 100) -> Admission:
    return Admission(AdmissionLimits(ranks, running, queue, streams))


def test_so_many_may_run_and_so_many_may_wait() -> None:
    some = admission()
    some.check(9, None, 9)
    with pytest.raises(QueueFull, match="10 requests in flight: 6 may run"):
        some.check(10, None, 10)


def test_a_wished_rank_has_its_own_room() -> None:
    some = admission()
    some.check(6, 6, 6)
    with pytest.raises(QueueFull, match="7 requests in flight on the wished rank: 3 may run"):
        some.check(7, 7, 7)


def test_the_wait_follows_the_pace_of_ends_within_bounds() -> None:
    def told(some: Admission) -> int:
        with pytest.raises(QueueFull) as caught:
            some.check(1000, None, 50)
        return caught.value.retry_after_ms

    some = admission()
    assert told(some) == 1000
    for tick in range(200):
        some.ended(tick * 0.2)
    assert told(some) == pytest.approx(200, abs=1)
    for tick in range(200):
        some.ended(40 + tick * 0.001)
    assert told(some) == 50
    some.ended(1e6)
    assert told(some) == 10_000
