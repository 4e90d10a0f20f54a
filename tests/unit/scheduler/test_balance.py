"""The planner of the experts' balance: what its plans may do, and how level they make the load."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_server.errors import InternalError
from ep_server.records import WAYS
from ep_server.scheduler import EMPTY, Placement, first_placement
from ep_server.scheduler.balance import (
    BalanceLimits,
    Plan,
    imbalance,
    plan_balance,
    rank_rows,
)
from ep_server.scheduler.layer_draft import NOISE
from ep_server.scheduler.placement import covers_any_loss

LIMITS = BalanceLimits()


def level_of(rows, placement: Placement, live, layer: int = 0) -> float:
    return imbalance(rank_rows(rows[layer], placement, layer, live).values())


def settle(rows, placement: Placement, live, limits: BalanceLimits = LIMITS) -> tuple[Placement, int]:
    """Plan after plan on the same rows until nothing changes: the placement and the number of loads."""
    loads = 0
    for _ in range(100):
        plan = plan_balance(rows, placement, live, limits)
        if plan.placement == placement:
            assert plan.moves == ()
            return placement, loads
        check(placement, plan, live, limits)
        for layer in range(len(rows)):
            before, after = (level_of(rows, each, live, layer) for each in (placement, plan.placement))
            assert after <= before + limits.gain + 1e-9
        placement, loads = plan.placement, loads + len(plan.moves)
    raise AssertionError("never settles")


def check(before: Placement, plan: Plan, live, limits: BalanceLimits) -> None:
    """A plan loads only where nobody serves, at most so much, and leaves every expert served."""
    after, per = plan.placement, before.slots_per_rank
    assert len(plan.moves) <= limits.moves
    changed = {
        (layer, slot, new)
        for layer, (old_row, new_row) in enumerate(zip(before.experts, after.experts, strict=True))
        for slot, (old, new) in enumerate(zip(old_row, new_row, strict=True))
        if old != new and not (new == EMPTY and after.serves[layer][slot] == 0)
    }
    assert changed <= set(plan.moves)
    for layer, slot, expert in plan.moves:
        assert before.serves[layer][slot] == 0
        assert slot // per in live
        assert after.experts[layer][slot] == expert
    for layer in range(len(after.experts)):
        for expert in range(after.num_experts):
            parts = [after.serves[layer][slot] for slot in after.slots_of(layer, expert, live)]
            assert (parts and WAYS % sum(parts) == 0) or after.serves[layer] == before.serves[layer]
        serving = [slot for slot, part in enumerate(after.serves[layer]) if part]
        assert EMPTY not in {after.experts[layer][slot] for slot in serving}
        if limits.copies is not None:
            assert len(serving) <= max(limits.copies, sum(map(bool, before.serves[layer])))
    if limits.keep_coverage and covers_any_loss(before, live):
        assert covers_any_loss(after, live)


@st.composite
def situations(draw):
    """A placement reached by plans for other rows, rows, live ranks and limits."""
    ranks, layers = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    live = draw(st.sets(st.integers(0, ranks - 1), min_size=1))
    experts = draw(st.integers(1, 12))
    slots = -(-experts // len(live)) + draw(st.integers(0, 3))
    placement = first_placement(layers, experts, slots, sorted(live), ranks)
    popularity = st.lists(st.integers(0, 10**6), min_size=experts, max_size=experts)
    limits = BalanceLimits(
        moves=draw(st.integers(0, 6)),
        copies=draw(st.none() | st.integers(experts, experts + 4)),
        keep_coverage=draw(st.booleans()),
    )
    for _ in range(draw(st.integers(0, 2))):
        earlier = [draw(popularity) for _ in range(layers)]
        placement = plan_balance(earlier, placement, live, limits).placement
    return placement, [draw(popularity) for _ in range(layers)], live, limits


@given(situations())
def test_plans_are_safe_and_come_to_an_end(situation):
    """And none makes the most loaded rank of a layer worse."""
    placement, rows, live, limits = situation
    settle(rows, placement, live, limits)


@given(situations())
def test_shares_predict_the_rows_of_ranks(situation):
    """Tokens that take each way equally often bring every rank the rows that the plan expects."""
    placement, rows, live, limits = situation
    placement, _ = settle(rows, placement, live, limits)
    for layer, counts in enumerate(rows):
        found = dict.fromkeys(live, 0.0)
        for expert, slots in enumerate(placement.routes(layer, 0, WAYS, live)):
            for slot in slots:
                found[slot // placement.slots_per_rank] += counts[expert] / WAYS
        assert found == pytest.approx(rank_rows(counts, placement, layer, live))


@pytest.mark.parametrize(("ranks", "experts", "slots"), [(2, 4, 4), (3, 3, 3), (3, 4, 4), (4, 4, 4)])
def test_free_slots_level_any_load(ranks, experts, slots):
    """All small loads: the rest is the coarseness of parts."""
    start = first_placement(1, experts, slots, range(ranks), ranks)
    for popularity in product((0, 1, 2, 5), repeat=experts):
        rows = [[count * 100_000 for count in popularity]]
        settled, _ = settle(rows, start, range(ranks))
        mean = sum(rows[0]) / ranks
        if mean:
            coarse = max(rows[0]) / WAYS / mean
            assert level_of(rows, settled, range(ranks)) <= LIMITS.act_above + LIMITS.gain + coarse, (
                popularity
            )


def zipf(experts: int, order=None) -> list[int]:
    popularity = [int(1e6 / (1 + n)) for n in range(experts)]
    return popularity if order is None else [popularity[n] for n in order]


@pytest.mark.parametrize(("ranks", "slots", "loads"), [(2, 65, 16), (4, 35, 16), (16, 9, 48)])
def test_zipf_is_level_after_few_loads(ranks, slots, loads):
    rows = [[min(count, 400_000) for count in zipf(128)]]
    start = first_placement(1, 128, slots, range(ranks), ranks)
    assert level_of(rows, start, range(ranks)) > 1.5
    settled, moves = settle(rows, start, range(ranks))
    assert level_of(rows, settled, range(ranks)) <= 1.04
    assert moves <= loads


def test_another_popularity_is_levelled_again():
    placement, live = first_placement(1, 128, 35, range(4), 4), range(4)
    for turn in range(8):
        order = [(n * 37 + turn * 11) % 128 for n in range(128)]
        rows = [zipf(128, order)]
        placement, loads = settle(rows, placement, live)
        assert level_of(rows, placement, live) <= 1.04
        assert loads <= 24


def test_shares_alone_level_what_every_rank_holds():
    """EP2 with all experts on both ranks: no load, and any one rank may still be lost."""
    experts = (0, 1, 2, 3, 3, 2, 1, 0)
    placement = Placement(4, 4, (experts,), ((1, 1, 1, 0, 1, 0, 0, 0),))
    plan = plan_balance([[70_000, 10_000, 10_000, 10_000]], placement, (0, 1), LIMITS)
    assert plan.moves == ()
    assert plan.placement.experts == (experts,)
    assert level_of([[70_000, 10_000, 10_000, 10_000]], plan.placement, (0, 1)) <= 1.02


def test_the_last_two_copies_stay_if_any_rank_may_be_lost():
    """Expert 0 could only be loaded over the second copy of another one."""
    held, serves = (0, 1, 2, 3, 0, 4, 1, 2, 3, 4), (1, 1, 0, 0, 0, 1, 0, 1, 1, 0)
    placement = Placement(5, 2, (held,), (serves,))
    rows, live = [[900_000, 10_000, 10_000, 10_000, 10_000]], range(5)
    assert covers_any_loss(placement, live)
    kept, loads = settle(rows, placement, live)
    assert covers_any_loss(kept, live)
    assert loads == 0
    given_up, _ = settle(rows, placement, live, BalanceLimits(keep_coverage=False))
    assert not covers_any_loss(given_up, live)
    assert level_of(rows, given_up, live) < level_of(rows, kept, live) - 0.5


def test_little_imbalance_is_left_alone():
    placement = first_placement(1, 4, 3, range(2), 2)
    assert (
        plan_balance([[505_000, 505_000, 495_000, 495_000]], placement, range(2), LIMITS).placement
        == placement
    )


def test_what_may_be_chance_is_left_alone():
    placement, rows = first_placement(1, 4, 3, range(2), 2), [60, 40, 50, 50]
    assert level_of([rows], placement, range(2)) == 1.0
    few = [[60, 50, 45, 45]]
    assert level_of(few, placement, range(2)) - 1 < NOISE / 10
    assert plan_balance(few, placement, range(2), LIMITS).placement == placement
    many = [[count * 1000 for count in few[0]]]
    assert plan_balance(many, placement, range(2), LIMITS).placement != placement


def test_no_rows_change_nothing():
    placement = first_placement(2, 4, 3, range(2), 2)
    assert plan_balance([[0] * 4] * 2, placement, range(2), LIMITS) == (placement, ())
    assert imbalance((0, 0)) == 1.0


def test_the_worst_layer_comes_first():
    placement = first_placement(2, 8, 6, range(2), 2)
    mild, bad = [3, 3, 3, 3, 2, 2, 2, 2], [9, 9, 9, 9, 1, 1, 1, 1]
    rows = [[count * 10_000 for count in layer] for layer in (mild, bad)]
    plan = plan_balance(rows, placement, range(2), BalanceLimits(moves=1))
    assert {move.layer for move in plan.moves} == {1}


def test_one_load_at_a_time_reaches_the_same():
    rows, live = [zipf(32)], range(4)
    start = first_placement(1, 32, 10, live, 4)
    settled, _ = settle(rows, start, live, BalanceLimits(moves=1))
    assert level_of(rows, settled, live) <= 1.04


def test_full_ranks_make_room_first():
    """The least loaded rank is full: its coldest expert moves away, and the next plan uses the slot."""
    placement = Placement(5, 3, ((0, 1, EMPTY, 2, 3, 4),), ((1, 1, 0, 1, 1, 1),))
    rows = [[500_000, 400_000, 30_000, 30_000, 4_000]]
    first = plan_balance(rows, placement, (0, 1), LIMITS)
    assert first.moves == ((0, 2, 4),)
    assert first.placement.experts == ((0, 1, 4, 2, 3, EMPTY),)
    settled, _ = settle(rows, placement, (0, 1))
    assert level_of(rows, settled, (0, 1)) <= 1.05


@pytest.mark.parametrize("first", [0, 31, 64, 97])
def test_spare_copies_of_cold_experts_give_way(first):
    """EP2 with few spare slots, all filled at start: what is popular may lie behind the copies there are."""
    popular = zipf(128)
    rows = [[popular[(expert + first) % 128] for expert in range(128)]]
    start = first_placement(1, 128, 71, range(2), 2).with_copies(range(2))
    settled, loads = settle(rows, start, range(2), BalanceLimits(moves=4))
    assert level_of(rows, settled, range(2)) <= 1.03
    assert loads <= 14


def test_copies_of_a_lost_rank_no_longer_serve():
    placement = Placement(2, 2, ((0, 1, 0, 1, 0, 1),), ((0, 0, 1, 0, 1, 1),))
    plan = plan_balance([[1000_000, 100_000]], placement, (0, 2), LIMITS)
    assert plan.placement.serves[0][2:4] == (0, 0)
    assert level_of([[1000_000, 100_000]], plan.placement, (0, 2)) <= 1.06


def test_an_expert_that_nobody_serves_is_an_error():
    with pytest.raises(InternalError, match="layer 0: no live rank serves expert 1"):
        plan_balance([[1, 1]], first_placement(1, 2, 1, range(2), 2), (0,), LIMITS)


@pytest.mark.slow
@settings(max_examples=2000)
@given(situations())
def test_many_more_plans_are_safe(situation):
    placement, rows, live, limits = situation
    settle(rows, placement, live, limits)
