"""Steps of a rank by example: continuous batching, chunks of prompts, steps planned ahead."""

from __future__ import annotations

import pytest

from ep_server.errors import ConfigError, InternalError
from ep_server.records import PENDING_TOKEN, FinishReason, StepBatch
from tests.support.ranks.simulated_rank import make_request, shape, small_rank, stream_alone


def test_long_prompt_is_chunked_and_samples_at_its_end():
    rank = small_rank(max_step_tokens=5)
    rank.add(make_request(1, range(12), max_new=3))
    steps = [shape(rank.step()) for _ in range(5)]
    assert steps == [
        [(1, 0, 5, False)],
        [(1, 5, 5, False)],
        [(1, 10, 2, True)],
        [(1, 12, 1, True)],
        [(1, 13, 1, True)],
    ]
    assert not rank.scheduler.has_work
    assert rank.stream(1) == stream_alone(rank.requests[1])


def test_decodes_come_first_and_chunks_take_what_is_left():
    rank = small_rank(max_step_tokens=6)
    rank.add(make_request(1, range(4)))
    rank.step()
    rank.add(make_request(2, range(9)))
    rank.add(make_request(3, range(8)))
    assert shape(rank.step()) == [(1, 4, 1, True), (2, 0, 5, False)]
    assert shape(rank.step()) == [(1, 5, 1, True), (2, 5, 4, True), (3, 0, 1, False)]
    assert shape(rank.step()) == [(1, 6, 1, True), (2, 9, 1, True), (3, 1, 4, False)]


def test_running_sequences_are_bounded_by_limit_and_step_tokens():
    for changes in ({"max_running": 2}, {"max_step_tokens": 2}):
        rank = small_rank(**changes)
        for number in range(5):
            rank.add(make_request(number, [number]))
        while rank.scheduler.has_work:
            rank.step()
            assert rank.scheduler.load().running <= 2
        assert all(rank.stream(n) == stream_alone(rank.requests[n]) for n in range(5))


def test_prefill_gets_a_token_of_every_step_beside_decodes():
    rank = small_rank(max_running=4, max_step_tokens=4)
    for number in range(3):
        rank.add(make_request(number, [number], max_new=40))
    rank.step()
    rank.add(make_request(9, range(10)))
    for _ in range(10):
        assert 9 in [s.number for s in rank.step().slices]
    assert len(rank.events[9]) == 1


def test_an_idle_rank_plans_an_empty_batch():
    rank = small_rank()
    assert not rank.scheduler.has_work
    batch = rank.scheduler.plan()
    assert batch == StepBatch((), 0)
    rank.scheduler.plan()  # a parked rank need not commit it
    assert rank.scheduler.commit(batch, []) == []


def test_later_higher_priority_does_not_starve_a_prefill():
    rank = small_rank(max_running=8, max_step_tokens=2)
    rank.add(make_request(0, [0], max_new=30))
    rank.step()
    rank.add(make_request(1, range(10), max_new=1))
    rank.step()
    for number in (2, 3):
        rank.add(make_request(number, [number], max_new=30, priority=5))
    for _ in range(9):
        assert 1 in [s.number for s in rank.step().slices]
    assert rank.stream(1) == stream_alone(rank.requests[1])


def test_admission_leaves_a_block_for_each_running_sequence():
    rank = small_rank(kv_blocks=6)
    for number in (1, 2):
        rank.add(make_request(number, [number, number], max_new=6))  # 2 blocks each at their end
    rank.step()
    rank.add(make_request(3, range(12), max_new=4))  # 3 of the 4 blocks that are left
    assert shape(rank.step()) == [(1, 2, 1, True), (2, 2, 1, True)]
    rank.finish_all()
    assert rank.scheduler.load().preemptions == 0
    assert rank.stream(3) == stream_alone(rank.requests[3])


def test_a_step_planned_ahead_continues_from_the_token_in_flight():
    rank = small_rank(ahead=1, max_step_tokens=5)
    rank.add(make_request(1, range(7), max_new=3))
    launched = [shape(rank.launch()), shape(rank.launch())]
    assert launched == [[(1, 0, 5, False)], [(1, 5, 2, True)]]
    with pytest.raises(InternalError, match="before the last batch was committed"):
        rank.scheduler.plan()
    rank.settle()
    ahead = rank.launch()
    assert shape(ahead) == [(1, 7, 1, True)] and list(ahead.slices[0].token_ids) == [PENDING_TOKEN]
    rank.settle()
    rank.launch()
    rank.settle()
    assert rank.launch().slices == ()  # its length says that the token in flight is the last one
    rank.settle()
    assert rank.stream(1) == stream_alone(rank.requests[1])
    assert not rank.scheduler.has_work


def test_what_was_computed_ahead_of_a_stop_reaches_nobody():
    alone = [token for token, _ in stream_alone(make_request(1, range(5), max_new=6))]
    rank = small_rank(ahead=1)
    rank.add(make_request(1, range(5), max_new=6, stops=alone[:1]))
    rank.add(make_request(2, range(3), max_new=6))
    rank.launch()
    assert [s.number for s in rank.launch().slices] == [1, 2]
    rank.settle()
    assert rank.stream(1) == [(alone[0], FinishReason.STOP_TOKEN)]
    assert [s.number for s in rank.launch().slices] == [2]  # its blocks are free for others at once
    rank.finish_all()
    assert len(rank.stream(1)) == 1 and rank.stream(2) == stream_alone(rank.requests[2])


def test_a_late_row_runs_again_and_holds_up_nobody():
    rank = small_rank(ahead=1)
    rank.add(make_request(1, range(5), max_new=4))
    rank.add(make_request(2, range(3), max_new=4))
    rank.launch(late=[1])
    assert [s.number for s in rank.launch().slices] == [2]
    rank.settle()  # its mask has come
    again, other = rank.launch().slices
    assert (again.number, again.start, list(again.token_ids)) == (1, 4, [4]) and other.number == 2
    rank.finish_all()
    assert all(rank.stream(n) == stream_alone(rank.requests[n]) for n in (1, 2))


def test_a_negative_number_of_steps_ahead_is_refused():
    with pytest.raises(ConfigError, match=r"scheduler\.ahead = -1: must be at least 0"):
        small_rank(ahead=-1)
