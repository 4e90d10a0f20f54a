"""Requests with equal new prefixes: the step that computes a block computes it once."""

from __future__ import annotations

import pytest

from ep_server.scheduler import SchedulerLimits
from tests.support.ranks.simulated_rank import SimulatedRank, make_request, stream_alone

COMMON = [n % 11 for n in range(40)]


def rank_of(**changes) -> SimulatedRank:
    values = {"max_running": 16, "max_step_tokens": 64, "block_size": 4, "kv_blocks": 200}
    return SimulatedRank(SchedulerLimits(**{**values, "prefix_cache": True, "max_context": 300, **changes}))


def computed(rank: SimulatedRank) -> int:
    """Prompt tokens that were run, over all requests."""
    prompts = {number: len(request.prompt_ids) for number, request in rank.requests.items()}
    return sum(
        len(piece.token_ids)
        for batch in rank.batches
        for piece in batch.slices
        if piece.start < prompts[piece.number]
    )


def check_streams(rank: SimulatedRank) -> None:
    for number, request in rank.requests.items():
        assert rank.stream(number) == stream_alone(request)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("tokens", [16, 64, 256])
def test_equal_new_prefixes_are_computed_once(ahead, tokens):
    rank = rank_of(ahead=ahead, max_step_tokens=tokens)
    for number in range(1, 7):
        rank.add(make_request(number, [*COMMON, number], max_new=5))
    rank.finish_all()
    assert computed(rank) == len(COMMON) + 6
    check_streams(rank)


def test_others_take_the_room_of_one_that_waits():
    rank = rank_of(max_step_tokens=64)
    rank.add(make_request(1, [*COMMON, 1]))
    rank.add(make_request(2, [*COMMON, 2]))
    rank.add(make_request(3, [9, 8, 7, 6, 5]))
    assert [piece.number for piece in rank.step().slices] == [1, 3]
    assert [piece.number for piece in rank.step().slices] == [1, 3, 2]
    rank.finish_all()
    check_streams(rank)


def test_one_waits_no_longer_than_for_what_it_shares():
    rank = rank_of(max_step_tokens=44)
    rank.add(make_request(1, [*COMMON[:36], *[5] * 200], max_new=3))
    rank.add(make_request(2, [*COMMON[:36], *[6] * 190], max_new=3))
    steps = [[(s.number, s.start) for s in rank.step().slices] for _ in range(2)]
    assert steps[0] == [(1, 0)]
    rank.finish_all()
    starts = [s.start for batch in rank.batches for s in batch.slices if s.number == 2]
    assert starts[0] == 36
    check_streams(rank)


def test_salts_and_bypass_share_nothing():
    rank = rank_of(max_step_tokens=256)
    rank.add(make_request(1, [*COMMON, 1], cache_salt="a"))
    rank.add(make_request(2, [*COMMON, 2], cache_salt="b"))
    rank.add(make_request(3, [*COMMON, 3], cache_salt="a", bypass_prefix_cache=True))
    assert [piece.number for piece in rank.step().slices] == [1, 2, 3]
    rank.finish_all()
    check_streams(rank)


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_second_goes_on_where_the_first_is_cancelled(ahead):
    rank = rank_of(max_step_tokens=16, ahead=ahead)
    rank.add(make_request(1, [*COMMON, 1]))
    rank.add(make_request(2, [*COMMON, 2]))
    rank.step()
    rank.scheduler.cancel(1)
    rank.finish_all()
    assert rank.stream(2) == stream_alone(rank.requests[2])


@pytest.mark.parametrize("ahead", [0, 1])
def test_lost_steps_are_computed_again(ahead):
    rank = rank_of(max_step_tokens=64, ahead=ahead)
    rank.add(make_request(1, [*COMMON, 1]))
    rank.add(make_request(2, [*COMMON, 2]))
    for _ in range(1 + ahead):
        rank.launch()
    rank.lose_steps()
    rank.finish_all()
    check_streams(rank)


def test_a_flush_ends_the_wait():
    rank = rank_of(max_step_tokens=16)
    rank.add(make_request(1, [*COMMON, 1]))
    rank.add(make_request(2, [*COMMON, 2]))
    rank.step()
    rank.scheduler.flush_cache()
    assert [piece.number for piece in rank.step().slices] == [1]
    rank.finish_all()
    check_streams(rank)


def test_blocks_of_a_lost_step_are_not_found_after_a_preemption():
    """It was to compute them for a waiting prompt too, and gave its own table back meanwhile."""
    rank = rank_of(kv_blocks=5, ahead=1)
    rank.add(make_request(1, range(7), max_new=9))
    rank.launch()
    rank.settle()
    for number in (2, 3):
        rank.add(make_request(number, [5] * 8, max_new=4))
    rank.launch()  # the prompt of 2
    rank.launch()  # both need a block for what comes next
    assert rank.scheduler.load().preemptions == 1
    rank.lose_steps(written=False)
    rank.finish_all()
    for number in (1, 2, 3):
        assert rank.stream(number) == stream_alone(rank.requests[number])
