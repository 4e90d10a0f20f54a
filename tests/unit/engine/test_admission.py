"""How many may come in, who leaves for whom, and what the others are told."""

from __future__ import annotations

import pytest

from ep_server.engine.admission import Admission, AdmissionLimits, Asked, Crowd
from ep_server.errors import InvalidArgument, QueueFull

ONE = Asked()


def admission(ranks: int = 2, running: int = 3, queue: int = 4, streams: int = 100) -> Admission:
    return Admission(AdmissionLimits(ranks, running, queue, streams), draw=lambda: 0.0)


def crowd(in_flight: int, behind: int = 0) -> Crowd:
    return Crowd(in_flight, in_flight, in_flight - behind, behind)


def paced(gap: float, **values: int) -> Admission:
    """Requests have ended every `gap` seconds, with all ranks full."""
    some = admission(**values)
    for tick in range(200):
        some.pace.ended(tick * gap, left=6)
    return some


def told(some: Admission, there: Crowd, asked: Asked = ONE) -> int:
    with pytest.raises(QueueFull) as caught:
        some.check(asked, there)
    return caught.value.retry_after_ms


def test_so_many_may_run_and_so_many_may_wait() -> None:
    some = admission()
    assert some.check(ONE, crowd(9)) == 0
    with pytest.raises(QueueFull, match="10 requests in flight: 6 may run"):
        some.check(ONE, crowd(10))


def test_requested_rank_has_its_own_room() -> None:
    some = admission()
    some.check(Asked(dp_rank=0), crowd(6))
    with pytest.raises(QueueFull, match="7 requests in flight on the requested rank: 3 may run"):
        some.check(Asked(dp_rank=0), crowd(7))


def test_open_streams_have_a_limit_of_their_own() -> None:
    some = admission(streams=20)
    some.check(ONE, Crowd(19, 2, 2))
    with pytest.raises(QueueFull, match="20 streams, the limit is"):
        some.check(ONE, Crowd(20, 2, 2))


@pytest.mark.parametrize(
    ("asked", "streams", "most"),
    [(Asked(sequences=11), 100, 10), (Asked(sequences=8, dp_rank=1), 100, 7), (Asked(sequences=4), 3, 3)],
)
def test_what_never_fits_is_not_asked_to_retry(asked: Asked, streams: int, most: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"num_sequences = {asked.sequences}: .* at most {most}, "):
        admission(streams=streams).check(asked, crowd(0))


def test_the_retry_is_the_wait_for_the_queue_ahead() -> None:
    full = crowd(10)
    assert told(admission(), full) == 1000  # nothing is known yet
    assert told(paced(0.2), full) == 1000  # five must end before this one would begin
    assert told(paced(0.1), full) == 500
    assert told(paced(0.1), Crowd(100, 0, 0)) == 50  # no stream is free, yet nobody waits
    assert told(paced(0.001), full) == 50
    assert told(paced(100.0), full) == 30_000


def test_the_retry_has_jitter() -> None:
    some = Admission(AdmissionLimits(2, 3, 4, 100), draw=iter((0.0, 0.5, 0.999)).__next__)
    assert [told(some, crowd(10)) for _ in range(3)] == [1000, 1500, 1999]


def test_the_wait_on_one_rank_is_that_of_its_share() -> None:
    assert told(paced(0.1), crowd(7), Asked(dp_rank=0)) == 1000  # every 0.2 s one of its requests ends


def test_requests_that_end_together_are_no_fast_pace() -> None:
    some = admission()
    for tick in range(50):
        for _ in range(6):
            some.pace.ended(float(tick), left=6)
    assert told(some, crowd(10)) == pytest.approx(1000 * 5 / 6, rel=0.15)


def test_work_that_is_given_up_is_no_fast_pace() -> None:
    some = admission()
    for tick in range(100):
        some.pace.ended(tick * 0.1, left=6, finished=tick % 2 == 0)
    assert told(some, crowd(10)) == pytest.approx(1000, rel=0.1)  # one result in 0.2 s


def test_time_without_load_is_no_slow_pace() -> None:
    some = paced(0.1)
    some.pace.ended(20.0, left=0)
    some.pace.ended(4000.0, left=6)
    assert told(some, crowd(10)) == pytest.approx(500, rel=0.05)


def test_a_deadline_that_the_queue_would_miss_is_refused() -> None:
    some = paced(0.1)
    some.check(Asked(timeout=0.35), crowd(8))  # three must end first
    with pytest.raises(QueueFull, match=r"would end in 0\.3 s, its deadline is in 0\.25 s") as caught:
        some.check(Asked(timeout=0.25), crowd(8))
    assert caught.value.retry_after_ms == 50
    some.check(Asked(timeout=0.001), crowd(5))  # it begins at once
    admission().check(Asked(timeout=0.001), crowd(9))  # nobody knows how long it takes


def test_a_deadline_must_leave_time_to_run() -> None:
    some = paced(0.1)
    some.pace.ran(seconds=0.4, tokens=40, finished=True)
    some.check(Asked(timeout=0.75), crowd(8))
    with pytest.raises(QueueFull, match=r"would end in 0\.7 s"):
        some.check(Asked(timeout=0.65), crowd(8))
    some.check(Asked(timeout=0.65, max_new_tokens=4), crowd(8))  # a short one
    some.pace.ran(seconds=1.0, tokens=10, finished=False)  # a slow one, which missed its deadline
    with pytest.raises(QueueFull):
        some.check(Asked(timeout=0.75), crowd(8))


def test_higher_priority_takes_the_place_of_those_behind() -> None:
    some = admission()
    assert some.check(ONE, crowd(9, behind=2)) == 0
    assert some.check(ONE, crowd(10, behind=2)) == 1
    assert some.check(Asked(sequences=2), crowd(10, behind=2)) == 2
    with pytest.raises(QueueFull):
        some.check(Asked(sequences=3), crowd(10, behind=2))


def test_places_that_are_being_freed_count_for_higher_priority() -> None:
    leaving = Crowd(10, 10, ahead=6, behind=2)  # two have ended, their blocks are not free yet
    assert admission().check(ONE, leaving) == 0
    with pytest.raises(QueueFull):
        admission().check(ONE, Crowd(10, 10, ahead=8))


def test_who_waits_behind_does_not_add_to_the_wait() -> None:
    some = paced(0.1)
    some.check(Asked(timeout=0.25), crowd(9, behind=2))
    with pytest.raises(QueueFull):
        some.check(Asked(timeout=0.25), crowd(9))
