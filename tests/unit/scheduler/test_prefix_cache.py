"""Prefixes that are computed once."""

from __future__ import annotations

from tests.support.ranks.simulated_rank import SimulatedRank, make_request, small_rank, stream_alone


def run_one(rank: SimulatedRank, number: int, prompt, **fields) -> tuple[int, int]:
    """Runs a request to its end; (cached_tokens of its first event, tokens its prefill computed)."""
    rank.add(make_request(number, prompt, max_new=2, **fields))
    before = len(rank.batches)
    rank.finish_all()
    assert rank.stream(number) == stream_alone(rank.requests[number])
    computed = sum(len(s.token_ids) for b in rank.batches[before:] for s in b.slices) - 1
    return rank.events[number][0].cached_tokens, computed


def test_equal_prefixes_are_computed_once():
    rank = small_rank(prefix_cache=True)
    prompt = tuple(range(10))
    assert run_one(rank, 1, prompt) == (0, 10)
    assert run_one(rank, 2, prompt) == (8, 2)
    assert run_one(rank, 3, prompt[:7]) == (4, 3)
    assert run_one(rank, 4, (*prompt[:5], 99, 99, 99)) == (4, 4)
    assert run_one(rank, 5, (99, *prompt[1:])) == (0, 10)
    load = rank.scheduler.load()
    assert (load.prefix_queries, load.prefix_hits) == (10 + 10 + 7 + 8 + 10, 8 + 4 + 4)


def test_a_wholly_cached_prompt_computes_its_last_block_again():
    rank = small_rank(prefix_cache=True)
    assert run_one(rank, 1, range(8)) == (0, 8)
    assert run_one(rank, 2, range(8)) == (4, 4)
    assert run_one(rank, 3, range(9)) == (8, 1)


def test_output_becomes_a_prefix_too():
    rank = small_rank(prefix_cache=True)
    rank.add(make_request(1, range(3), max_new=7))
    rank.finish_all()
    tokens = (*range(3), *(token for token, _ in stream_alone(rank.requests[1])))
    assert run_one(rank, 2, tokens) == (8, 2)  # the last token drawn was never run


def test_salt_and_bypass_do_not_share():
    rank = small_rank(prefix_cache=True)
    assert run_one(rank, 1, range(8), cache_salt="a") == (0, 8)
    assert run_one(rank, 2, range(8), cache_salt="b") == (0, 8)
    assert run_one(rank, 3, range(8)) == (0, 8)
    assert run_one(rank, 4, range(8), bypass_prefix_cache=True) == (0, 8)
    assert run_one(rank, 5, range(8), cache_salt="a") == (4, 4)


def test_a_bypassing_request_leaves_nothing_behind():
    rank = small_rank(prefix_cache=True)
    run_one(rank, 1, range(8), bypass_prefix_cache=True)
    assert rank.scheduler.load().kv_blocks_cached == 0
    assert run_one(rank, 2, range(8)) == (0, 8)


def test_running_sequences_share_blocks():
    rank = small_rank(prefix_cache=True, kv_blocks=9)
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
    rank = small_rank(prefix_cache=True, kv_blocks=6)
    for number in range(10):
        run_one(rank, number, [number] * 17)
    assert rank.scheduler.load().kv_blocks_total == 6
