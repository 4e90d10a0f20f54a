"""Requests to ranks and experts to ranks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep_server.errors import InternalError, InvalidArgument
from ep_server.records import RankLoad, Request, Sampling, Stopping
from ep_server.scheduler import choose_rank, place_experts


def request(dp_rank: int | None = None) -> Request:
    return Request("r", 1, (1,), Sampling(), Stopping(1), dp_rank=dp_rank)


def load(blocks: int, running: int = 0, waiting: int = 0) -> RankLoad:
    return RankLoad(running=running, waiting=waiting, kv_blocks_used=blocks, kv_blocks_total=100)


@pytest.mark.parametrize(
    ("loads", "rank"),
    [
        ([load(5), load(4), load(6)], 1),
        ([load(4, 3), load(4, 1, 1), load(4, 0, 3)], 1),
        ([load(4, 2), load(4, 1, 1), load(5)], 0),
        ([load(0)], 0),
        ([load(9, 9, 9), load(0)], 1),
    ],
)
def test_fewest_blocks_then_fewest_requests_then_lowest_rank(loads, rank):
    assert choose_rank(loads, request()) == rank


def test_the_wish_of_the_caller_wins():
    assert choose_rank([load(0), load(99, 9)], request(dp_rank=1)) == 1


@pytest.mark.parametrize("wish", [-1, 2])
def test_a_rank_that_is_not_there_is_named(wish):
    with pytest.raises(InvalidArgument, match=f"dp_rank = {wish}: must be 0 to 1"):
        choose_rank([load(0), load(0)], request(dp_rank=wish))


def test_no_rank_is_an_error():
    with pytest.raises(InternalError):
        choose_rank([], request())


@given(st.integers(0, 300), st.integers(1, 70))
def test_experts_lie_contiguous_and_even(experts, ranks):
    table = place_experts(experts, ranks)
    assert len(table) == experts and list(table) == sorted(table)
    owned = Counter(table)
    sizes = [owned[rank] for rank in range(ranks)]
    assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1


def test_experts_by_example():
    assert place_experts(7, 3) == (0, 0, 0, 1, 1, 2, 2)
    assert place_experts(2, 4) == (0, 1)


@pytest.mark.parametrize(("experts", "ranks"), [(-1, 2), (4, 0)])
def test_impossible_placements_are_errors(experts, ranks):
    with pytest.raises(InternalError):
        place_experts(experts, ranks)
