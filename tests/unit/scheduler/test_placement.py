"""Requests to ranks and experts to ranks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep_server.errors import InternalError, InvalidArgument, Unavailable
from ep_server.records import RankLoad, Request, Sampling, Stopping
from ep_server.scheduler import EMPTY, Placement, choose_rank, first_placement, place_experts
from ep_server.scheduler.placement import spread_rank


def request(dp_rank: int | None = None) -> Request:
    return Request("r", 1, (1,), Sampling(), Stopping(1), dp_rank=dp_rank)


def load(blocks: int, running: int = 0, waiting: int = 0) -> RankLoad:
    return RankLoad(running=running, waiting=waiting, kv_blocks_used=blocks, kv_blocks_total=100)


def choose(loads, request, near=range(0), absent=()):
    """choose_rank, of loads in rank order without those of absent ranks."""
    live = {rank: load for rank, load in enumerate(loads) if rank not in absent}
    return choose_rank(live, request, len(loads), near)


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
    assert choose(loads, request()) == rank


def test_requests_that_run_again_are_spread_over_all_ranks():
    """Not all to the one with little load: it has just joined."""
    loads, tokens = {0: load(50, 9), 2: load(3), 3: load(50, 8)}, Counter[int]()
    for length in (100, 100, 100, 40, 100):
        tokens[spread_rank(loads, tokens)] += length
    assert tokens == {0: 100, 2: 140, 3: 200}
    assert spread_rank({0: load(100), 1: load(99)}, {1: 500}) == 1, "a full rank comes last"


def test_the_wish_of_the_caller_wins():
    assert choose([load(0), load(99, 9)], request(dp_rank=1)) == 1


@pytest.mark.parametrize("wish", [-1, 2])
def test_a_rank_that_is_not_there_is_named(wish):
    with pytest.raises(InvalidArgument, match=f"dp_rank = {wish}: must be 0 to 1"):
        choose([load(0), load(0)], request(dp_rank=wish))


def test_absent_ranks_get_no_request():
    loads = [load(0), load(5), load(2)]
    assert choose(loads, request(), absent=(0,)) == 2
    assert choose(loads, request(), near=range(0, 1), absent=(0,)) == 2
    with pytest.raises(Unavailable, match="dp_rank = 0: the node of this rank is out"):
        choose(loads, request(dp_rank=0), absent=(0,))


def test_no_rank_is_an_error():
    with pytest.raises(InternalError):
        choose([], request())


@pytest.mark.parametrize(
    ("loads", "near", "rank"),
    [
        ([load(0), load(0), load(0), load(0)], range(2, 4), 2),
        ([load(0), load(0), load(4, 1), load(0)], range(2, 4), 3),  # the least loaded of the near ones
        ([load(0), load(4, 1)], range(1, 2), 1),  # one request ahead
        ([load(0), load(8, 2)], range(1, 2), 0),  # two
        ([load(8, 2), load(12, 2, 1)], range(1, 2), 1),
        ([load(8, 2), load(13, 2, 1)], range(1, 2), 0),
        ([load(70, 40), load(80, 40)], range(1, 2), 1),  # an eighth of 80
        ([load(69, 40), load(80, 40)], range(1, 2), 0),
        ([load(9, 1), load(5, 9)], range(1, 2), 1),  # the least loaded of all is near
        ([load(5), load(4)], range(0), 1),  # nobody is near
    ],
)
def test_near_ranks_first_but_for_a_head_start(loads, near, rank):
    assert choose(loads, request(), near) == rank


def test_the_wish_of_the_caller_wins_over_nearness():
    assert choose([load(0), load(99, 9)], request(dp_rank=1), range(0, 1)) == 1


LOADS = st.builds(load, st.integers(0, 60), st.integers(0, 8), st.integers(0, 8))


@st.composite
def groups(draw) -> tuple[list[RankLoad], range]:
    """(loads of a few nodes, the ranks of one of them)"""
    ranks, nodes = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    node = draw(st.integers(0, nodes - 1))
    loads = draw(st.lists(LOADS, min_size=ranks * nodes, max_size=ranks * nodes))
    return loads, range(node * ranks, (node + 1) * ranks)


@given(groups())
def test_placement_picks_the_least_loaded_rank_or_local_rank(group):
    loads, near = group
    anywhere, here = choose(loads, request()), choose(loads[near.start : near.stop], request())
    chosen = choose(loads, request(), near)
    assert chosen in (anywhere, near[here])
    assert chosen in near or loads[chosen].kv_blocks_used < min(loads[r].kv_blocks_used for r in near)


@given(groups(), st.data())
def test_more_load_never_draws_a_request(group, data):
    loads, near = group
    chosen = choose(loads, request(), near)
    rank = data.draw(st.integers(0, len(loads) - 1))
    more = load(
        loads[rank].kv_blocks_used + data.draw(st.integers(0, 20)),
        loads[rank].running,
        loads[rank].waiting + data.draw(st.integers(0, 5)),
    )
    heavier = [*loads[:rank], more, *loads[rank + 1 :]]
    assert rank == chosen or choose(heavier, request(), near) != rank


@given(st.lists(st.integers(1, 9), min_size=1, max_size=120), st.integers(1, 3), st.integers(2, 4))
def test_no_rank_starves_whatever_node_requests_come_to(sizes, ranks, nodes):
    """All come to the last node and none ends: the others are never behind by more than the head start."""
    loads = [load(0) for _ in range(ranks * nodes)]
    near = range(ranks * (nodes - 1), ranks * nodes)
    for size in sizes:
        rank = choose(loads, request(), near)
        loads[rank] = load(loads[rank].kv_blocks_used + size, loads[rank].running + 1)
    least = min(one.kv_blocks_used for one in loads)
    for one in loads:
        before = one.kv_blocks_used - max(sizes)  # when the last one came
        assert before <= max(least + max(sizes), least * 8 / 7)


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


def test_first_placement_has_every_expert_once_and_spares_empty():
    placement = first_placement(2, 10, 5, live=(0, 1, 3), num_ranks=4)
    assert placement.num_ranks == 4
    assert placement.experts[0] == placement.experts[1]
    assert placement.experts[0] == (
        (0, 1, 2, 3, EMPTY) + (4, 5, 6, EMPTY, EMPTY) + (EMPTY,) * 5 + (7, 8, 9, EMPTY, EMPTY)
    )
    assert placement.missing(live=(0, 1, 3)) == ()
    assert placement.missing(live=(0, 3)) == tuple((layer, e) for layer in (0, 1) for e in (4, 5, 6))


def test_first_placement_refuses_too_few_slots():
    with pytest.raises(InternalError, match="4 experts do not fit into the 3 slots"):
        first_placement(1, 8, 3, live=(0, 2), num_ranks=3)


def test_routes_share_tokens_among_serving_live_replicas():
    placement = Placement(2, 2, ((0, 1, 1, EMPTY, 1, 0),), ((True, True, True, False, True, False),))
    everyone = (0, 1, 2)
    assert placement.routes(0, 0, 6, everyone) == ((0,) * 6, (1, 2, 4, 1, 2, 4))
    assert placement.routes(0, 1, 3, everyone)[1] == (2, 4, 1)
    assert placement.routes(0, 0, 4, live=(0, 2))[1] == (1, 4, 1, 4)
    with pytest.raises(InternalError, match="layer 0: no live rank serves expert 0"):
        placement.routes(0, 0, 1, live=(1, 2))


@pytest.mark.parametrize(("ranks", "spares"), [(2, 4), (2, 3), (3, 3), (4, 6), (1, 2)])
def test_spare_copies_are_of_others_experts(ranks: int, spares: int) -> None:
    """All copies that fit, none twice on a rank, and none of them serves."""
    experts, most = 8, ranks + 1
    per = min(experts, -(-experts // ranks) + spares)
    first = first_placement(2, experts, per, range(ranks), most)
    copied = first.with_copies(range(ranks))
    assert copied.serves == first.serves
    for before, after in zip(first.experts, copied.experts, strict=True):
        for rank in range(most):
            old, new = (held[rank * per : (rank + 1) * per] for held in (before, after))
            assert all(e in (EMPTY, now) for e, now in zip(old, new, strict=True))
            held = [e for e in new if e != EMPTY]
            assert len(set(held)) == len(held) == (0 if rank == ranks else per)
