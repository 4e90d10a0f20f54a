"""Blocks of a lost rank: which are named when, and what the rank that takes over copies and computes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ep_server.errors import InternalError
from ep_server.records import StepBatch
from ep_server.scheduler import SchedulerLimits
from ep_server.scheduler.lost_blocks import LostBlock, LostBlocks
from tests.support.ranks.simulated_rank import SimulatedRank, make_request, stream_alone

BLOCK = 4
PROMPT = [token % 5 for token in range(18)]
LIMITS = SchedulerLimits(
    max_running=8, max_step_tokens=16, block_size=BLOCK, kv_blocks=64, prefix_cache=True, max_context=200
)
CACHES = [(True, False), (True, True), (False, False)]  # prefix_cache, bypass_prefix_cache


def lost_after(
    steps: int, limits: SchedulerLimits = LIMITS, count: int = 1, **fields: object
) -> SimulatedRank:
    """A rank that has run so many steps of a request with `count` sequences."""
    rank = SimulatedRank(limits)
    for number in range(1, count + 1):
        group = 1 if count > 1 else 0
        rank.add(replace(make_request(number, PROMPT, 30, **fields), request_id="r", group=group))
    for _ in range(steps):
        rank.step()
    return rank


def taken_over(lost: SimulatedRank, **fields: object) -> SimulatedRank:
    rank = SimulatedRank(lost.limits)
    for name, value in fields.items():
        setattr(rank, name, value)
    rank.take_over(lost)
    return rank


def ran(batches: list[StepBatch]) -> int:
    return sum(batch.num_tokens for batch in batches)


def check_streams(rank: SimulatedRank) -> None:
    rank.finish_all()
    for number, request in rank.requests.items():
        assert rank.stream(number) == stream_alone(request)
    assert not rank.named_wrongly()


def test_a_name_is_set_once_the_step_that_fills_its_block_ended() -> None:
    rank = lost_after(0)
    batch = rank.launch()
    assert ran([batch]) == 16 and not rank.names
    rank.settle()
    assert sorted(rank.names.values()) == sorted(rank.scheduler._live[1].digests(4))
    rank.step()
    rank.step()  # 18 of the prompt and a drawn one
    assert len(rank.names) == 4
    rank.step()
    assert len(rank.names) == 5 and not rank.named_wrongly()


def test_a_name_is_cleared_when_its_block_is_handed_out() -> None:
    rank = lost_after(8, replace(LIMITS, kv_blocks=13))
    rank.finish_all()
    assert len(rank.names) == (len(PROMPT) + 29) // BLOCK
    rank.add(make_request(2, [7] * 40, 1))
    rank.launch()
    assert len(rank.names) == 13 - 10 - 1 + (13 - 12)  # all but those handed out
    assert not rank.named_wrongly()


@pytest.mark.parametrize(("prefix_cache", "bypass"), CACHES)
@pytest.mark.parametrize("count", [1, 3])
def test_full_blocks_are_copied_and_the_rest_is_computed(
    prefix_cache: bool, bypass: bool, count: int
) -> None:
    limits = replace(LIMITS, prefix_cache=prefix_cache)
    lost = lost_after(12, limits, count, bypass_prefix_cache=bypass)
    lengths = [len(PROMPT) + len(lost.events[number]) for number in range(1, count + 1)]
    rank = taken_over(lost)
    rank.launch()
    computed = sum(length - (length - 1) // BLOCK * BLOCK for length in lengths)
    assert ran([rank.in_flight[0][0]]) == computed
    shared = sum((length - 1) // BLOCK for length in lengths)
    assert rank.scheduler.lost.copied == shared
    assert rank.scheduler.load().prefix_hits == 0
    check_streams(rank)


def test_a_prompt_in_chunks_goes_on_after_its_last_whole_chunk() -> None:
    rank = taken_over(lost_after(1))  # 16 of 18 tokens have run
    rank.step()
    assert ran(rank.batches) == 2
    assert rank.events[1][0].cached_tokens == 0, "no prefix cache had them"
    check_streams(rank)


@pytest.mark.parametrize("right", [0, 2])
def test_what_was_freed_meanwhile_is_computed(right: int) -> None:
    lost = lost_after(12)
    length = len(PROMPT) + len(lost.events[1])
    rank = taken_over(lost, lost_right=right)
    rank.step()
    assert ran(rank.batches) == min(length - right * BLOCK, LIMITS.max_step_tokens)
    check_streams(rank)


def test_the_rank_that_took_over_may_be_lost_too() -> None:
    second = taken_over(lost_after(12))
    second.step()
    third = taken_over(second)
    third.step()
    assert third.scheduler.lost.copied == second.scheduler.lost.copied > 0
    check_streams(third)


def test_other_weights_find_nothing() -> None:
    lost = lost_after(12)
    rank = SimulatedRank(lost.limits)
    rank.scheduler.flush_cache(weights=1)
    rank.take_over(lost)
    rank.step()
    assert rank.scheduler.lost.copied == 0
    check_streams(rank)


def test_a_flush_takes_away_what_lost_ranks_have_left() -> None:
    """Offered before, asked for afterwards."""
    lost = lost_after(12)
    rank = SimulatedRank(lost.limits)
    rank.take_over(lost)
    rank.scheduler.flush_cache()
    rank.step()
    assert rank.scheduler.lost.copied == 0
    check_streams(rank)


def test_a_flush_takes_all_names_away() -> None:
    lost = lost_after(12)
    assert lost.names
    lost.scheduler.flush_cache()
    assert not lost.names
    for _ in range(8):
        lost.step()
    assert not lost.names, "these blocks come after forgotten ones"
    rank = taken_over(lost)
    check_streams(rank)
    assert rank.scheduler.lost.copied == 0


def test_lost_steps_keep_the_names() -> None:
    rank = lost_after(12)
    names = dict(rank.names)
    rank.launch()
    rank.lose_steps()
    assert rank.names == names
    check_streams(rank)


def test_a_cancelled_sequence_copies_nothing() -> None:
    rank = taken_over(lost_after(12))
    rank.scheduler.plan()
    assert rank.scheduler.lost.next is not None
    assert rank.scheduler.cancel(1)
    assert rank.scheduler.lost.next is None
    assert rank.scheduler.load().kv_blocks_used == 0
    rank.scheduler.check_integrity()


def test_a_new_request_shares_what_was_copied() -> None:
    rank = taken_over(lost_after(12))
    rank.step()
    rank.add(make_request(9, PROMPT, 4))
    check_streams(rank)
    assert rank.events[9][0].cached_tokens == 16


def test_requests_that_bypass_the_cache_find_only_their_own() -> None:
    lost = lost_after(12, bypass_prefix_cache=True)
    rank = taken_over(lost)
    rank.add(make_request(9, PROMPT, 4))
    rank.add(make_request(10, PROMPT, 4, bypass_prefix_cache=True))
    check_streams(rank)
    own = (len(PROMPT) + 12 - 2 - 1) // BLOCK
    assert abs(rank.scheduler.lost.copied - own) <= 1
    assert rank.events[10][0].cached_tokens == 0


def test_a_copy_that_has_not_ended_is_not_taken() -> None:
    lost = LostBlocks()
    ticket = lost.copy([3], [LostBlock(0, 1, b"name")])
    with pytest.raises(InternalError, match="has not ended"):
        lost.take_arrived(ticket)


def test_new_prompts_wait_for_streams_that_continue() -> None:
    """Also while their blocks are copied: a step that is full of new prompts would hold them up."""
    lost = lost_after(12)
    rank = SimulatedRank(lost.limits)
    rank.add(make_request(5, [9] * 40, 4))
    rank.step()  # 16 of its prompt
    rank.take_over(lost)
    rank.add(make_request(6, [8] * 12, 4))
    sizes = [[(piece.number, len(piece.token_ids)) for piece in rank.step().slices] for _ in range(2)]
    assert [number for number, _ in sizes[0]] == [1] and sizes[0][0][1] < BLOCK + 1
    assert sizes[1][0] == (1, 1) and sum(size for _, size in sizes[1]) == 16
    check_streams(rank)
