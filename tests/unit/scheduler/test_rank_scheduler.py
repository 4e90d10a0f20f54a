"""The rank scheduler on a simulated KV cache, by example: order, limits, preemption, prefixes, cancel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ep_server.errors import ConfigError, ContextLengthExceeded, InternalError, InvalidArgument
from ep_server.records import NO_TOKEN, PENDING_TOKEN, FinishReason, RankLoad, SampledToken, StepBatch
from ep_server.scheduler import SchedulerLimits
from ep_server.scheduler.prompt_budget import Room
from ep_server.scheduler.sequence import NEVER
from tests.support.ranks.simulated_rank import SimulatedRank, make_request, stream_alone


def rank_of(**changes) -> SimulatedRank:
    values = {
        "max_running": 8,
        "max_step_tokens": 16,
        "block_size": 4,
        "kv_blocks": 32,
        "prefix_cache": False,
        "max_context": 100,
    }
    return SimulatedRank(SchedulerLimits(**{**values, **changes}))


def shape(batch: StepBatch) -> list[tuple[int, int, int, bool]]:
    return [(s.number, s.start, len(s.token_ids), s.sample) for s in batch.slices]


# --- continuous batching and chunked prefill ---


def test_long_prompt_is_chunked_and_samples_at_its_end():
    rank = rank_of(max_step_tokens=5)
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
    rank = rank_of(max_step_tokens=6)
    rank.add(make_request(1, range(4)))
    rank.step()
    rank.add(make_request(2, range(9)))
    rank.add(make_request(3, range(8)))
    assert shape(rank.step()) == [(1, 4, 1, True), (2, 0, 5, False)]
    assert shape(rank.step()) == [(1, 5, 1, True), (2, 5, 4, True), (3, 0, 1, False)]
    assert shape(rank.step()) == [(1, 6, 1, True), (2, 9, 1, True), (3, 1, 4, False)]


def test_running_sequences_are_bounded_by_limit_and_step_tokens():
    for changes in ({"max_running": 2}, {"max_step_tokens": 2}):
        rank = rank_of(**changes)
        for number in range(5):
            rank.add(make_request(number, [number]))
        while rank.scheduler.has_work:
            rank.step()
            assert rank.scheduler.load().running <= 2
        assert all(rank.stream(n) == stream_alone(rank.requests[n]) for n in range(5))


def test_prefill_gets_a_token_of_every_step_beside_decodes():
    rank = rank_of(max_running=4, max_step_tokens=4)
    for number in range(3):
        rank.add(make_request(number, [number], max_new=40))
    rank.step()
    rank.add(make_request(9, range(10)))
    for _ in range(10):
        assert 9 in [s.number for s in rank.step().slices]
    assert len(rank.events[9]) == 1


def test_an_idle_rank_plans_an_empty_batch():
    rank = rank_of()
    assert not rank.scheduler.has_work
    batch = rank.scheduler.plan()
    assert batch == StepBatch((), 0)
    rank.scheduler.plan()  # a parked rank need not commit it
    assert rank.scheduler.commit(batch, []) == []


def test_later_higher_priority_does_not_starve_a_prefill():
    rank = rank_of(max_running=8, max_step_tokens=2)
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
    rank = rank_of(kv_blocks=6)
    for number in (1, 2):
        rank.add(make_request(number, [number, number], max_new=6))  # 2 blocks each at their end
    rank.step()
    rank.add(make_request(3, range(12), max_new=4))  # 3 of the 4 blocks that are left
    assert shape(rank.step()) == [(1, 2, 1, True), (2, 2, 1, True)]
    rank.finish_all()
    assert rank.scheduler.load().preemptions == 0
    assert rank.stream(3) == stream_alone(rank.requests[3])


# --- order ---


def test_higher_priority_first_then_first_come():
    rank = rank_of(max_running=1)
    for number, priority in [(1, 0), (2, 5), (3, 0), (4, 5), (5, -1)]:
        rank.add(make_request(number, [number], max_new=1, priority=priority))
    order = [rank.step().slices[0].number for _ in range(5)]
    assert order == [2, 4, 1, 3, 5]


def test_higher_priority_preempts_prefill():
    rank = rank_of(max_step_tokens=4)
    rank.add(make_request(1, range(12)))
    rank.step()
    rank.add(make_request(2, range(3), priority=1, max_new=2))
    assert shape(rank.step()) == [(2, 0, 3, True), (1, 4, 1, False)]
    rank.finish_all()
    assert [rank.stream(n) for n in (1, 2)] == [stream_alone(rank.requests[n]) for n in (1, 2)]


def test_small_requests_do_not_overtake_a_waiting_large_one():
    rank = rank_of(kv_blocks=8)
    rank.add(make_request(1, range(16), max_new=10))  # 4 blocks, growing to 7
    rank.step()
    rank.add(make_request(2, range(20), max_new=2))  # 5 blocks: must wait for 1
    rank.step()
    rank.add(make_request(3, [1], max_new=1))
    while rank.scheduler.has_work:
        running = {s.number for s in rank.step().slices}
        assert running == {1} or 1 not in running
    assert [len(rank.events[n]) for n in (1, 2, 3)] == [10, 2, 1]


def test_a_short_prompt_does_not_wait_for_long_ones():
    rank = rank_of(max_step_tokens=4, kv_blocks=100)
    for number in (1, 2):
        rank.add(make_request(number, range(40)))
    rank.step()
    rank.add(make_request(3, range(3)))
    assert shape(rank.step()) == [(3, 0, 3, True), (1, 4, 1, False)]
    rank.finish_all()
    assert all(rank.stream(n) == stream_alone(rank.requests[n]) for n in (1, 2, 3))


def test_a_stream_that_continues_precedes_new_prompts():
    """Also shorter ones, and those that began before it came."""
    rank = rank_of(max_step_tokens=8, kv_blocks=100)
    rank.add(make_request(1, range(12)))
    rank.step()
    rank.add(make_request(2, range(3)))
    continues = make_request(3, range(10), max_new=8)
    drawn = tuple(token for token, _ in stream_alone(continues)[:5])
    rank.add(replace(continues, output_ids=drawn))
    assert shape(rank.step()) == [(3, 0, 8, False)]
    assert shape(rank.step())[0] == (3, 8, 7, True)
    rank.finish_all()
    assert rank.stream(3) == stream_alone(continues)[5:]
    assert all(rank.stream(n) == stream_alone(rank.requests[n]) for n in (1, 2))


def test_short_prompts_do_not_starve_a_long_one():
    rank = rank_of(max_step_tokens=4, kv_blocks=100, max_overtakes=3)
    rank.add(make_request(0, range(40), max_new=1))
    for number in range(1, 60):
        rank.add(make_request(number, [number] * 3, max_new=1))
        rank.step()
    assert len(rank.events[0]) == 1
    rank.finish_all()


def test_a_stream_of_high_priorities_cannot_starve_a_low_one():
    rank = rank_of(max_running=1, max_overtakes=3)
    rank.add(make_request(0, [0], max_new=1, priority=-5))
    number = 0
    while not rank.events[0]:
        number += 1
        assert number < 10
        rank.add(make_request(number, [1], max_new=1, priority=5))
        rank.step()
    assert number == 4  # three went before it


def test_overtaken_request_keeps_its_blocks_under_preemption():
    rank = rank_of(kv_blocks=6, max_running=2, max_overtakes=1)
    rank.add(make_request(1, range(4), max_new=1, priority=1))
    rank.add(make_request(2, range(4), max_new=17, priority=-1))  # 5 blocks at its end
    rank.add(make_request(3, range(4), max_new=17, priority=1))
    rank.finish_all()
    assert rank.scheduler.load().preemptions == 1
    last_steps = {s.number: i for i, batch in enumerate(rank.batches) for s in batch.slices}
    assert last_steps[2] < last_steps[3]
    assert all(rank.stream(n) == stream_alone(rank.requests[n]) for n in (1, 2, 3))


# --- preemption ---


def test_the_youngest_gives_its_blocks_back_and_repeats_nothing():
    rank = rank_of(kv_blocks=6, max_step_tokens=64)
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
    rank = rank_of(kv_blocks=6, max_step_tokens=64)
    rank.add(make_request(1, range(8), max_new=14, priority=0))
    rank.add(make_request(2, range(8), max_new=14, priority=1))
    rank.finish_all()
    assert {s.number for batch in rank.batches[1:] for s in batch.slices if s.start == 0} == {1}


def test_a_preempted_sequence_finds_its_own_prefix_again():
    rank = rank_of(kv_blocks=7, max_step_tokens=64, prefix_cache=True)
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
    rank = rank_of(kv_blocks=7, max_step_tokens=64, prefix_cache=True)
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
    rank = rank_of()
    rank.add(make_request(1, range(8), max_new=2, scores=0))
    rank.finish_all()
    assert told == [NEVER]


# --- prefix cache ---


def run_one(rank: SimulatedRank, number: int, prompt, **fields) -> tuple[int, int]:
    """Runs a request to its end; (cached_tokens of its first event, tokens its prefill computed)."""
    rank.add(make_request(number, prompt, max_new=2, **fields))
    before = len(rank.batches)
    rank.finish_all()
    assert rank.stream(number) == stream_alone(rank.requests[number])
    computed = sum(len(s.token_ids) for b in rank.batches[before:] for s in b.slices) - 1
    return rank.events[number][0].cached_tokens, computed


def test_equal_prefixes_are_computed_once():
    rank = rank_of(prefix_cache=True)
    prompt = tuple(range(10))
    assert run_one(rank, 1, prompt) == (0, 10)
    assert run_one(rank, 2, prompt) == (8, 2)
    assert run_one(rank, 3, prompt[:7]) == (4, 3)
    assert run_one(rank, 4, (*prompt[:5], 99, 99, 99)) == (4, 4)
    assert run_one(rank, 5, (99, *prompt[1:])) == (0, 10)
    load = rank.scheduler.load()
    assert (load.prefix_queries, load.prefix_hits) == (10 + 10 + 7 + 8 + 10, 8 + 4 + 4)


def test_a_wholly_cached_prompt_computes_its_last_block_again():
    rank = rank_of(prefix_cache=True)
    assert run_one(rank, 1, range(8)) == (0, 8)
    assert run_one(rank, 2, range(8)) == (4, 4)
    assert run_one(rank, 3, range(9)) == (8, 1)


def test_output_becomes_a_prefix_too():
    rank = rank_of(prefix_cache=True)
    rank.add(make_request(1, range(3), max_new=7))
    rank.finish_all()
    tokens = (*range(3), *(token for token, _ in stream_alone(rank.requests[1])))
    assert run_one(rank, 2, tokens) == (8, 2)  # the last token drawn was never run


def test_salt_and_bypass_do_not_share():
    rank = rank_of(prefix_cache=True)
    assert run_one(rank, 1, range(8), cache_salt="a") == (0, 8)
    assert run_one(rank, 2, range(8), cache_salt="b") == (0, 8)
    assert run_one(rank, 3, range(8)) == (0, 8)
    assert run_one(rank, 4, range(8), bypass_prefix_cache=True) == (0, 8)
    assert run_one(rank, 5, range(8), cache_salt="a") == (4, 4)


def test_a_bypassing_request_leaves_nothing_behind():
    rank = rank_of(prefix_cache=True)
    run_one(rank, 1, range(8), bypass_prefix_cache=True)
    assert rank.scheduler.load().kv_blocks_cached == 0
    assert run_one(rank, 2, range(8)) == (0, 8)


def test_running_sequences_share_blocks():
    rank = rank_of(prefix_cache=True, kv_blocks=9)
    rank.add(make_request(0, range(16), max_new=12))
    rank.step()
    rank.add(make_request(1, (*range(16), 50), max_new=3))
    rank.add(make_request(2, (*range(16), 60), max_new=3))
    rank.step()
    tables = {s.number: list(s.blocks) for s in rank.scheduler.plan().slices}
    assert tables[0][:4] == tables[1][:4] == tables[2][:4]
    assert len({tables[n][4] for n in (0, 1, 2)}) == 3
    assert rank.scheduler.load().kv_blocks_used == 7


def test_cached_blocks_give_way_to_running_ones():
    rank = rank_of(prefix_cache=True, kv_blocks=6)
    for number in range(10):
        run_one(rank, number, [number] * 17)
    assert rank.scheduler.load().kv_blocks_total == 6


# --- ends ---


@pytest.mark.parametrize("kind", ["eos", "stops"])
@pytest.mark.parametrize("min_new", [0, 1, 4])
def test_stops_end_a_request_unless_too_early(kind, min_new):
    rank = rank_of()
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
    rank = rank_of()
    rank.add(make_request(1, range(5), max_new=3, eos={probe[2]}, stops={probe[2]}))
    rank.finish_all()
    assert rank.stream(1)[-1] == (probe[2], FinishReason.EOS)


def test_events_carry_what_the_sampler_reported():
    scheduler = rank_of().scheduler
    scheduler.add(make_request(4, range(3)))
    batch = scheduler.plan()
    top = ((5, -0.5), (6, -1.5))
    (event,) = scheduler.commit(batch, [SampledToken(4, 5, -0.5, top)])
    assert (event.number, event.token_id, event.logprob, event.top) == (4, 5, -0.5, top)


# --- cancel and failure ---


def test_cancel_of_a_waiting_request_is_at_once():
    rank = rank_of()
    rank.add(make_request(1, range(3)))
    assert rank.scheduler.cancel(1)
    assert rank.scheduler.freed() == [1] and rank.scheduler.freed() == []
    assert not rank.scheduler.has_work and rank.scheduler.plan().slices == ()
    assert not rank.scheduler.cancel(1)


def test_cancel_of_a_running_request_between_steps_is_at_once():
    rank = rank_of()
    rank.add(make_request(1, range(3)))
    rank.step()
    assert rank.scheduler.load().kv_blocks_used == 1
    assert rank.scheduler.cancel(1)
    assert rank.scheduler.freed() == [1] and rank.scheduler.load().kv_blocks_used == 0
    rank.scheduler.check_integrity()


@pytest.mark.parametrize("drop", ["cancel", "fail"])
@pytest.mark.parametrize("prompt", [3, 40])
def test_dropped_request_in_flight_ends_silently_at_commit(drop, prompt):
    rank = rank_of()
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
    rank = rank_of()
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
    rank = rank_of()
    rank.add(make_request(1, range(3)))
    rank.scheduler.cancel(1)
    rank.add(make_request(1, range(4)))
    rank.finish_all()
    assert rank.stream(1) == stream_alone(rank.requests[1])


# --- what cannot be ---


def test_a_request_that_never_fits_is_refused_with_the_numbers():
    rank = rank_of(kv_blocks=4, block_size=4, max_context=20)
    rank.add(make_request(1, range(10), max_new=7))  # 16 places: exactly 4 blocks
    with pytest.raises(
        ContextLengthExceeded, match=r"10 \+ max_new_tokens 8 .* need 5 KV blocks of 4 tokens; a rank has 4"
    ):
        rank.add(make_request(2, range(10), max_new=8))
    with pytest.raises(ContextLengthExceeded, match=r"10 \+ max_new_tokens 11 .* the context of 20"):
        rank.add(make_request(2, range(10), max_new=11))
    rank.finish_all()
    assert rank.stream(1) == stream_alone(rank.requests[1])


@pytest.mark.parametrize(
    ("prompt", "fields", "field"),
    [
        ((), {}, "prompt_ids"),
        ((1,), {"max_new": 0}, "max_new_tokens = 0"),
        ((1,), {"max_new": 3, "min_new": 4}, "min_new_tokens = 4: must be 0 to max_new_tokens"),
        ((1,), {"min_new": -1}, "min_new_tokens = -1"),
    ],
)
def test_bad_requests_name_their_field(prompt, fields, field):
    with pytest.raises(InvalidArgument, match=field):
        rank_of().add(make_request(1, prompt, **fields))


def test_misuse_is_an_internal_error_and_changes_nothing():
    rank = rank_of()
    rank.add(make_request(1, range(3)))
    with pytest.raises(InternalError, match="number 1 is already"):
        rank.add(make_request(1, range(3)))
    batch = rank.scheduler.plan()
    with pytest.raises(InternalError, match="before the last batch was committed"):
        rank.scheduler.plan()
    with pytest.raises(InternalError, match="not in flight"):
        rank.scheduler.commit(StepBatch(batch.slices, batch.num_tokens), [])
    for wrong in ([], [SampledToken(2, 0)], [SampledToken(1, 0)] * 2):
        with pytest.raises(InternalError, match=r"awaited for \[1\]"):
            rank.scheduler.commit(batch, wrong)
    rank.finish(batch, rank.run(batch))
    rank.finish_all()
    assert rank.stream(1) == stream_alone(rank.requests[1])


@pytest.mark.parametrize(
    "field", ["max_running", "max_step_tokens", "block_size", "kv_blocks", "max_context", "max_overtakes"]
)
def test_limits_are_checked(field):
    with pytest.raises(ConfigError, match=f"scheduler.{field} = 0: must be at least 1"):
        rank_of(**{field: 0})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s._live.pop(1),
        lambda s: s._decoding.append(s._decoding[0]),
        lambda s: s._decoding[0].blocks.pop(),
        lambda s: setattr(s._decoding[0], "capacity", 99),
        lambda s: setattr(s._decoding[0], "computed", 0),
        lambda s: s._decoding[0].tokens.append(0),
        lambda s: s._waiting._by_order.reverse(),
        lambda s: s._waiting._by_arrival.pop(),
        lambda s: s._waiting.push(s._decoding[0]),
    ],
)
def test_check_integrity_notices(spoil):
    rank = rank_of(max_running=1)
    for number in (1, 2, 3):
        rank.add(make_request(number, range(3)))
    rank.step()
    rank.scheduler.check_integrity()
    spoil(rank.scheduler)
    with pytest.raises(InternalError):
        rank.scheduler.check_integrity()


def test_load_and_repr_count():
    rank = rank_of(max_running=1)
    for number in (1, 2):
        rank.add(make_request(number, range(5)))
    rank.step()
    assert rank.scheduler.load() == RankLoad(1, 1, 2, 32, 0, 1, 0, 0, 0)
    assert repr(rank.scheduler) == (
        "RankScheduler(decoding=1, prefilling=0, waiting=1, BlockLedger(used=2, cached=0, total=32))"
    )


# --- planned ahead ---


def test_a_step_planned_ahead_continues_from_the_token_in_flight():
    rank = rank_of(ahead=1, max_step_tokens=5)
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
    rank = rank_of(ahead=1)
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
    rank = rank_of(ahead=1)
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
        rank_of(ahead=-1)
