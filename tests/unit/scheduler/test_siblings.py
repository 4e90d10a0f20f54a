"""Sequences of one request: the prompt is prefilled once, its full blocks are shared, nobody is stranded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ep_server.scheduler import SchedulerLimits
from tests.support.ranks.simulated_rank import SimulatedRank, make_request, stream_alone

BLOCK, PROMPT, COUNT = 4, [n % 13 for n in range(18)], 8
FULL, TAIL = 4, 2  # blocks and tokens of the prompt
CACHE = [(False, False), (True, False), (True, True)]  # prefix_cache, bypass_prefix_cache


def rank_of(**changes: object) -> SimulatedRank:
    values = {
        "max_running": 16,
        "max_step_tokens": 64,
        "block_size": BLOCK,
        "kv_blocks": 64,
        "prefix_cache": True,
        "max_context": 200,
    }
    return SimulatedRank(SchedulerLimits(**{**values, **changes}))


def add(rank: SimulatedRank, count: int, first: int = 1, **fields: object) -> list[int]:
    """Returns: the numbers of a request's sequences."""
    numbers = list(range(first, first + count))
    for number in numbers:
        group = first if count > 1 else 0
        rank.add(replace(make_request(number, PROMPT, **fields), group=group, request_id=f"r{first}"))
    return numbers


def prefilled(rank: SimulatedRank) -> int:
    """Tokens of prompts that ran."""
    pieces = [piece for batch in rank.batches for piece in batch.slices]
    return sum(min(piece.start + len(piece.token_ids), len(PROMPT)) - piece.start for piece in pieces
               if piece.start < len(PROMPT))  # fmt: skip


def check_streams(rank: SimulatedRank, numbers: list[int]) -> None:
    rank.finish_all()
    assert all(rank.stream(number) == stream_alone(rank.requests[number]) for number in numbers)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("prefix_cache", "bypass"), CACHE)
def test_the_prompt_is_prefilled_once(prefix_cache: bool, bypass: bool, ahead: int) -> None:
    rank = rank_of(prefix_cache=prefix_cache, ahead=ahead, max_step_tokens=32)
    numbers = add(rank, COUNT, bypass_prefix_cache=bypass)
    most = 0
    while rank.scheduler.has_work and not all(rank.events[number] for number in numbers):
        rank.step()
        most = max(most, rank.scheduler.load().kv_blocks_used)
    assert prefilled(rank) == len(PROMPT) + (COUNT - 1) * TAIL
    assert FULL + COUNT <= most <= FULL + 2 * COUNT  # one block of its own each, or a second one
    assert [rank.events[n][0].cached_tokens for n in numbers] == [0] + [FULL * BLOCK] * (COUNT - 1)
    check_streams(rank, numbers)


@pytest.mark.parametrize(("prefix_cache", "bypass"), CACHE)
def test_one_that_ends_at_once_leaves_its_blocks(prefix_cache: bool, bypass: bool) -> None:
    rank = rank_of(prefix_cache=prefix_cache)
    numbers = add(rank, COUNT, max_new=1, bypass_prefix_cache=bypass)
    check_streams(rank, numbers)
    assert prefilled(rank) == len(PROMPT) + (COUNT - 1) * TAIL


@pytest.mark.parametrize(("prefix_cache", "bypass"), CACHE)
def test_only_a_cached_prompt_is_shared_with_others(prefix_cache: bool, bypass: bool) -> None:
    rank = rank_of(prefix_cache=prefix_cache)
    first = add(rank, 3, bypass_prefix_cache=bypass)
    rank.step()
    rank.step()
    second = add(rank, 2, first=10, bypass_prefix_cache=bypass)
    check_streams(rank, first + second)
    shared = prefix_cache and not bypass
    assert rank.events[10][0].cached_tokens == (FULL * BLOCK if shared else 0)
    assert bool(rank.scheduler.load().kv_blocks_cached) == shared


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("drop", ["cancel", "fail"])
def test_the_next_prefills_when_the_first_is_gone(drop: str, bypass: bool) -> None:
    """Gone in the middle of its prefill, and the second before its own begins."""
    rank = rank_of(max_step_tokens=10)
    numbers = add(rank, 4, bypass_prefix_cache=bypass)
    rank.launch()
    getattr(rank.scheduler, drop)(1)
    rank.settle()
    getattr(rank.scheduler, drop)(2)
    check_streams(rank, numbers[2:])
    assert [rank.events[number] for number in (1, 2)] == [[], []]
    # What the first ran is in the prefix cache, where the request uses it.
    assert prefilled(rank) == 10 + len(PROMPT) - (0 if bypass else 2 * BLOCK) + TAIL


def test_others_run_while_they_wait() -> None:
    rank = rank_of(max_step_tokens=24)
    add(rank, 3)
    rank.add(make_request(9, [7, 7], max_new=2))
    batch = rank.step()
    assert [piece.number for piece in batch.slices] == [1, 9]
    assert rank.scheduler.load().waiting == 2
    check_streams(rank, [1, 2, 3, 9])


def test_a_preempted_first_is_waited_for() -> None:
    """The prompt of the first is half run when a decoding sequence needs its blocks."""
    rank = rank_of(kv_blocks=8, max_step_tokens=2, prefix_cache=False)
    rank.add(make_request(20, [1, 2, 3], max_new=20, priority=1))
    rank.step()
    numbers = add(rank, 2, max_new=3)
    check_streams(rank, [20, *numbers])
    assert rank.scheduler.load().preemptions


def test_a_prompt_of_one_block_waits_for_nobody() -> None:
    rank = rank_of()
    for number in (1, 2, 3):
        rank.add(replace(make_request(number, PROMPT[:BLOCK]), group=1))
    assert [piece.number for piece in rank.step().slices] == [1, 2, 3]
    check_streams(rank, [1, 2, 3])
