"""How much of a step prompts get: on a machine whose step times are known, and by example."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import pytest

from ep_server.records import SeqSlice, StepBatch
from ep_server.scheduler import SchedulerLimits
from ep_server.scheduler.batch import AUTO_BUDGET
from ep_server.scheduler.prompt_budget import PromptBudget, RanStep, Room, prompt_tokens
from ep_server.scheduler.sequence import ScheduledSequence
from tests.support.ranks.simulated_rank import SimulatedRank, make_request, stream_alone

MS = 1_000_000
STREAMS = 64
SIZES = (128, 192, 256, 320, 448, 576, 768, 960, 1216, 1536, 1920, 2432, 3072, 3840, 4096)


def limits_of(budget: int = AUTO_BUDGET, **changes) -> SchedulerLimits:
    values = {"max_running": 80, "max_step_tokens": 4096, "block_size": 16, "kv_blocks": 8192}
    values |= {"prefix_cache": False, "max_context": 1 << 17, "itl_budget_ns": budget}
    return SchedulerLimits(**{**values, **changes})


def streams(count: int, began: int = 0) -> list[ScheduledSequence]:
    found = [sequence(number) for number in range(1, count + 1)]
    for seq in found:
        seq.began = began
    return found


def sequence(number: int, since: int = 1) -> ScheduledSequence:
    seq = ScheduledSequence(make_request(number, range(4)), number, 16, False, 0)
    seq.since = since
    return seq


def chunk(start: int, count: int, singles: int = STREAMS) -> StepBatch:
    """The streams, and a chunk of a prompt if count is not 0."""
    each = [SeqSlice(number, 500, (0,), (), True) for number in range(singles)]
    piece = [SeqSlice(99, start, range(count), (), False)] if count else []
    return StepBatch((*each, *piece), singles + count)


def gpu(rows: int, pairs: float) -> float:
    """ns of a step where weights are read in 13 ms, and beyond 300 rows products take longer than that."""
    return (13 + max(0.0, 0.01 * (rows - 300))) * MS + 1.3 * pairs


def gpu_of_experts(rows: int, pairs: float) -> float:
    """ns of a step where one token reads few weights and 64 read all."""
    return gpu(rows, pairs) - 10 * MS * (1 - min(rows, 64) / 64)


def cpu(rows: int, pairs: float) -> float:
    """ns of a step where every row costs the same."""
    return 2 * MS + 0.5 * MS * rows + 20 * pairs


def prompt_beside_streams(
    budget: PromptBudget, length: int, time: Callable[[int, float], float], singles: int = STREAMS
) -> list[tuple[int, float]]:
    """(tokens, ns) of the steps of one prompt beside the streams; times vary by 2 %."""
    steps, at, noises, sizes = [], 0, cycle((1.0, 1.02, 0.98, 1.01, 0.99)), budget.limits.step_sizes
    while at < length:
        _, room = budget.room(streams(singles), sequence(99), 1, 0)
        count = min(room.fit(at, length), length - at)
        rows = next((size for size in sizes if size >= singles + count), singles + count)
        took = time(rows, count * (at + count / 2)) * next(noises)
        batch = chunk(at, count, singles)
        budget.ran(RanStep(int(took), rows, singles, prompt_tokens(batch)), batch)
        steps.append((count, took))
        at += count
    return steps


def learned(
    limits: SchedulerLimits, time: Callable[[int, float], float], singles: int = STREAMS
) -> PromptBudget:
    budget = PromptBudget(limits)
    for _ in range(20):
        budget.ran(RanStep(int(time(singles, 0)), singles, singles, 0), chunk(0, 0, singles))
    return budget


@pytest.mark.parametrize(("time", "sizes"), [(gpu, ()), (gpu, SIZES), (cpu, ())])
@pytest.mark.parametrize("length", [1000, 32768])
def test_steps_stay_within_twice_the_base(time, sizes, length):
    budget = learned(limits_of(step_sizes=sizes), time)
    base = time(STREAMS, 0)
    for _ in range(3):  # the second prompt finds what the first one taught
        steps = prompt_beside_streams(budget, length, time)
        assert max(took for _, took in steps) <= 2.1 * base
        used = sum(took for _, took in steps) / len(steps)
    if length > 10_000:
        assert used >= 1.4 * base, "steps leave much of their budget unused"


def test_a_configured_budget_is_kept():
    budget = learned(limits_of(40 * MS), gpu)
    steps = prompt_beside_streams(budget, 32768, gpu)
    assert max(took for _, took in steps) <= 40 * MS
    assert sum(took for _, took in steps) >= 25 * MS * len(steps)


def test_prompts_go_on_where_streams_alone_exceed_it():
    budget = learned(limits_of(1 * MS), gpu)
    assert {count for count, _ in prompt_beside_streams(budget, 640, gpu)} == {16}


@pytest.mark.parametrize(
    ("asked", "tokens", "prompts", "counts"),
    [
        (1 * MS, 64, 1, {1}),
        (1 * MS, 65, 1, {1, 16}),
        (1 * MS, 40, 2, {8, 16}),  # one by one, prompts would queue up
        (40 * MS, 40, 1, {40}),
        (AUTO_BUDGET, 40, 1, {40}),
    ],
)
def test_few_tokens_run_one_by_one_where_no_chunk_keeps_a_budget(asked, tokens, prompts, counts):
    budget = learned(limits_of(asked), gpu)
    for _ in range(3):
        prompt_beside_streams(budget, 64, gpu)
    taken, at = set(), 0
    while at < tokens:
        _, room = budget.room(streams(STREAMS), sequence(99), prompts, 0)
        taken.add(count := min(room.fit(at, tokens), tokens - at))
        at += count
    assert taken == counts


def test_chunks_are_tried_again_after_one_that_seemed_dear():
    """The host was busy in the first step with a prompt: it took 50 ms more."""
    budget = learned(limits_of(20 * MS), gpu)
    budget.ran(RanStep(int(gpu(80, 0)) + 50 * MS, 80, STREAMS, 16), chunk(0, 16))
    rounds = [len(prompt_beside_streams(budget, 40, gpu)) for _ in range(60)]
    assert rounds[0] == 40 and max(rounds[40:]) <= 3


@pytest.mark.parametrize(("sizes", "counts"), [((), (130, 130, 130)), (SIZES, (20, 12, 12))])
def test_a_prompt_beside_one_stream_does_not_crawl(sizes, counts):
    """Its smallest step takes four times as long as one of the stream alone."""
    budget = learned(limits_of(step_sizes=sizes), gpu_of_experts, singles=1)
    for most in counts:
        steps = prompt_beside_streams(budget, 4000, gpu_of_experts, singles=1)
        assert len(steps) <= most
        assert max(took for _, took in steps) <= 1.7 * gpu_of_experts(64, 0)


def test_few_prompts_leave_the_model_careful():
    """After small chunks alone, whose tokens seemed dear or free, a long prompt begins with small ones."""
    budget = learned(limits_of(step_sizes=SIZES), gpu)
    for _ in range(100):
        prompt_beside_streams(budget, 33, gpu)
    steps = prompt_beside_streams(budget, 32768, gpu)
    assert max(took for _, took in steps) <= 2.1 * gpu(STREAMS, 0)


@pytest.mark.parametrize(
    ("budget", "began", "since", "prompts", "elsewhere", "whole"),
    [
        (0, 0, 5, 1, 0, True),  # no budget
        (AUTO_BUDGET, 4, 5, 1, 0, False),
        (AUTO_BUDGET, 5, 5, 1, 0, True),  # the prompt was there first
        (AUTO_BUDGET, 5, 5, 1, 3, False),  # but another rank's streams were not
        (AUTO_BUDGET, 4, 5, STREAMS, 0, False),
        (AUTO_BUDGET, 4, 5, STREAMS + 1, 0, True),  # more prompts wait than streams run
        (30 * MS, 5, 5, STREAMS + 1, 0, False),  # a configured budget has no exceptions
    ],
)
def test_who_may_not_be_held_up(budget, began, since, prompts, elsewhere, whole):
    model = learned(limits_of(budget), gpu)
    count, room = model.room(streams(STREAMS, began), sequence(99, since), prompts, elsewhere)
    assert count == (STREAMS if budget != AUTO_BUDGET or began < since else 0)
    assert (room.fit(0, 4096) == 4096 - STREAMS) == whole


def test_without_streams_a_step_is_full():
    assert learned(limits_of(), gpu).room([], sequence(99), 1, 0)[1].fit(0, 4096) == 4096


def test_other_ranks_streams_count_without_own_ones():
    assert learned(limits_of(), gpu).room([], sequence(99), 1, 3)[1].fit(0, 4096) < 4096


def test_room_ends_with_its_time():
    room = Room(tokens=1000, ns=100.0, used=10, token=1.0)
    assert room.fit(0, 4096) == 100
    room.take(0, 60)
    assert room.fit(0, 4096) == 40
    room.take(0, 40)
    assert room.tokens == 0


def test_room_fills_a_padded_step():
    room = Room(tokens=1000, ns=100.0, used=10, token=1.0, sizes=(64, 100, 128))
    assert room.fit(0, 4096) == 90  # 110 rows would be padded to 128
    room.take(0, 90)
    assert room.fit(0, 4096) == 10  # nothing smaller is left


def test_attention_makes_later_chunks_smaller():
    room = Room(tokens=1000, ns=100.0, token=1.0, pair=0.01)
    assert 1 <= room.fit(1000, 4096) < room.fit(100, 4096) < room.fit(0, 4096) < 100


def test_a_long_prompt_beside_a_stream_is_cut():
    rank = SimulatedRank(limits_of(max_step_tokens=640, kv_blocks=64, block_size=16, ahead=1))
    rank.add(make_request(1, range(4), max_new=40))
    for _ in range(4):
        rank.step()
    rank.scheduler.budget.ran(RanStep(13 * MS, 1, 1, 0), StepBatch((), 0))
    rank.add(make_request(2, [n % 7 for n in range(300)], max_new=4))
    rank.finish_all()
    sizes = [len(s.token_ids) for batch in rank.batches for s in batch.slices if s.number == 2]
    assert sizes[:3] == [16, 16, 16]  # nothing was measured beside streams
    for number in (1, 2):
        assert rank.stream(number) == stream_alone(rank.requests[number])


def test_a_stream_that_continues_gets_whole_steps():
    """Also beside streams of other ranks. It waits longer than they: the rank that ran it was lost."""
    rank = SimulatedRank(limits_of(max_step_tokens=64, kv_blocks=64, block_size=16))
    rank.add(make_request(1, range(4), max_new=40))
    rank.step()
    rank.scheduler.budget.ran(RanStep(13 * MS, 1, 1, 0), StepBatch((), 0))
    rank.add(make_request(2, [n % 7 for n in range(120)], output_ids=(3, 4, 5)))
    rank.elsewhere = 20
    rank.finish_all()
    sizes = [len(s.token_ids) for batch in rank.batches for s in batch.slices if s.number == 2]
    assert sizes[:2] == [63, 60]


def test_requests_that_arrive_together_fill_their_steps():
    rank = SimulatedRank(limits_of(max_step_tokens=64, kv_blocks=64, block_size=16))
    for number in range(1, 9):
        rank.add(make_request(number, [number, *range(31)], max_new=20))
    rank.finish_all()
    assert [batch.num_tokens for batch in rank.batches[:4]] == [64, 64, 64, 64]
