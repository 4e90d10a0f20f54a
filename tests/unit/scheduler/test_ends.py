"""How requests end: stops, cancel, failure."""

from __future__ import annotations

import pytest

from ep_server.records import NO_TOKEN, FinishReason, RankLoad, SampledToken
from tests.support.ranks.simulated_rank import make_request, small_rank, stream_alone


@pytest.mark.parametrize("kind", ["eos", "stops"])
@pytest.mark.parametrize("min_new", [0, 1, 4])
def test_stops_end_a_request_unless_too_early(kind, min_new):
    rank = small_rank()
    probe = [token for token, _ in stream_alone(make_request(1, range(5), max_new=9))]
    rank.add(make_request(1, range(5), max_new=9, min_new=min_new, **{kind: {probe[2]}}))
    rank.finish_all()
    position = next((i for i in range(min_new, 9) if probe[i] == probe[2]), 8)
    reason = FinishReason.EOS if kind == "eos" else FinishReason.STOP_TOKEN
    finish = reason if probe[position] == probe[2] else FinishReason.LENGTH
    assert rank.stream(1) == [
        (t, finish if i == position else None) for i, t in enumerate(probe[: position + 1])
    ]


def test_a_stop_on_the_last_allowed_token_is_a_stop():
    probe = [token for token, _ in stream_alone(make_request(1, range(5), max_new=3))]
    assert probe[2] not in probe[:2]
    rank = small_rank()
    rank.add(make_request(1, range(5), max_new=3, eos={probe[2]}, stops={probe[2]}))
    rank.finish_all()
    assert rank.stream(1)[-1] == (probe[2], FinishReason.EOS)


def test_events_carry_what_the_sampler_reported():
    scheduler = small_rank().scheduler
    scheduler.add(make_request(4, range(3)))
    batch = scheduler.plan()
    top = ((5, -0.5), (6, -1.5))
    (event,) = scheduler.commit(batch, [SampledToken(4, 5, -0.5, top)])
    assert (event.number, event.token_id, event.logprob, event.top) == (4, 5, -0.5, top)


def test_cancel_of_a_waiting_request_is_at_once():
    rank = small_rank()
    rank.add(make_request(1, range(3)))
    assert rank.scheduler.cancel(1)
    assert rank.scheduler.freed() == [1] and rank.scheduler.freed() == []
    assert not rank.scheduler.has_work and rank.scheduler.plan().slices == ()
    assert not rank.scheduler.cancel(1)


def test_cancel_of_a_running_request_between_steps_is_at_once():
    rank = small_rank()
    rank.add(make_request(1, range(3)))
    rank.step()
    assert rank.scheduler.load().kv_blocks_used == 1
    assert rank.scheduler.cancel(1)
    assert rank.scheduler.freed() == [1] and rank.scheduler.load().kv_blocks_used == 0
    rank.scheduler.check_integrity()


@pytest.mark.parametrize("drop", ["cancel", "fail"])
@pytest.mark.parametrize("prompt", [3, 40])
def test_dropped_request_in_flight_ends_silently_at_commit(drop, prompt):
    rank = small_rank()
    rank.add(make_request(1, range(2), max_new=30))
    rank.add(make_request(2, range(prompt), max_new=1))
    batch = rank.scheduler.plan()
    assert getattr(rank.scheduler, drop)(2) and getattr(rank.scheduler, drop)(2)
    assert rank.scheduler.freed() == [] and rank.scheduler.load().running == 2
    rank.finish(batch, rank.run(batch))
    assert rank.events[2] == [] and len(rank.events[1]) == 1
    assert rank.freed == ([2] if drop == "cancel" else [])
    assert rank.scheduler.load() == RankLoad(
        running=1, kv_blocks_used=1, kv_blocks_total=32, steps=1, prefix_queries=0
    )
    assert not rank.scheduler.cancel(2)


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("steps", [0, 1])
def test_request_without_a_token_fails_alone(cancelled, steps):
    rank = small_rank()
    rank.add(make_request(1, range(2), max_new=30))
    rank.add(make_request(2, range(3), max_new=30))
    for _ in range(steps):
        rank.step()
    batch = rank.scheduler.plan()
    if cancelled:
        rank.scheduler.cancel(2)
    events = rank.scheduler.commit(batch, [SampledToken(1, 7), SampledToken(2, NO_TOKEN)])
    assert [event.number for event in events] == [1]
    assert rank.scheduler.freed() == ([2] if cancelled else [])
    assert rank.scheduler.load().running == 1
    rank.scheduler.check_integrity()


def test_a_cancelled_number_may_come_again():
    rank = small_rank()
    rank.add(make_request(1, range(3)))
    rank.scheduler.cancel(1)
    rank.add(make_request(1, range(4)))
    rank.finish_all()
    assert rank.stream(1) == stream_alone(rank.requests[1])
