"""Sequences that give their blocks back, and continue without a difference."""

from __future__ import annotations

from ep_server.scheduler.prompt_budget import Room
from ep_server.scheduler.sequence import NEVER
from tests.support.ranks.simulated_rank import make_request, small_rank, stream_alone


def test_the_youngest_gives_its_blocks_back_and_repeats_nothing():
    rank = small_rank(kv_blocks=6, max_step_tokens=64)
    for number in (1, 2):
        rank.add(make_request(number, range(number, number + 8), max_new=14))  # 6 blocks each at their end
    rank.finish_all()
    assert rank.scheduler.load().preemptions >= 1
    restarted = [s for batch in rank.batches for s in batch.slices if s.start == 0]
    assert [s.number for s in restarted][:2] == [1, 2] and {s.number for s in restarted[2:]} == {2}
    assert tuple(restarted[2].token_ids[:8]) == rank.requests[2].prompt_ids
    assert len(restarted[2].token_ids) > 8 and restarted[2].sample
    for number in (1, 2):
        assert rank.stream(number) == stream_alone(rank.requests[number])


def test_the_lowest_priority_is_preempted_before_the_youngest():
    rank = small_rank(kv_blocks=6, max_step_tokens=64)
    rank.add(make_request(1, range(8), max_new=14, priority=0))
    rank.add(make_request(2, range(8), max_new=14, priority=1))
    rank.finish_all()
    assert {s.number for batch in rank.batches[1:] for s in batch.slices if s.start == 0} == {1}


def test_a_preempted_sequence_finds_its_own_prefix_again():
    rank = small_rank(kv_blocks=7, max_step_tokens=64, prefix_cache=True)
    for number in (1, 2):
        rank.add(make_request(number, range(number, number + 8), max_new=14))
    rank.finish_all()
    assert rank.scheduler.load().preemptions >= 1
    firsts = [s.start for b in rank.batches for s in b.slices if s.number == 2 and len(s.token_ids) > 1]
    assert firsts[0] == 0 and any(start > 0 for start in firsts[1:])
    for number in (1, 2):
        assert rank.stream(number) == stream_alone(rank.requests[number])
        assert {event.cached_tokens for event in rank.events[number]} == {0}
    assert rank.scheduler.load().prefix_queries == 16  # a second admission is no query


def test_what_is_left_to_run_is_counted_at_each_admission(monkeypatch):
    """Also of a prompt that was preempted. Here each admission runs all that is left in one chunk."""
    told, fit = [], Room.fit
    monkeypatch.setattr(
        Room, "fit", lambda room, start, whole: told.append((start, whole)) or fit(room, start, whole)
    )
    rank = small_rank(kv_blocks=7, max_step_tokens=64, prefix_cache=True)
    for number in (1, 2):
        rank.add(make_request(number, range(number, number + 8), max_new=14))
    rank.finish_all()
    assert rank.scheduler.load().preemptions >= 1
    assert told == [
        (s.start, len(s.token_ids)) for b in rank.batches for s in b.slices if len(s.token_ids) > 1
    ]


def test_a_prompt_whose_positions_are_scored_is_not_short(monkeypatch):
    """Its steps have no graph, so they should be few."""
    told, fit = [], Room.fit
    monkeypatch.setattr(Room, "fit", lambda room, start, whole: told.append(whole) or fit(room, start, whole))
    rank = small_rank()
    rank.add(make_request(1, range(8), max_new=2, scores=0))
    rank.finish_all()
    assert told == [NEVER]
