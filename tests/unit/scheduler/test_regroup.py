"""Placements for other live ranks: every loss pattern, joins, and what may change while steps run."""

from __future__ import annotations

from itertools import combinations

import pytest

from ep_server.records import EMPTY
from ep_server.scheduler import Placement, first_placement
from ep_server.scheduler.regroup import next_placement

LAYERS = 3
SHAPES = [(8, 3, 4), (8, 4, 4), (6, 6, 2), (7, 4, 3), (128, 43, 4), (5, 5, 3)]  # experts, slots, ranks


def check(before: Placement, after: Placement, live: set[int]) -> None:
    """Complete; absent ranks hold nothing; slots that served before serve the same or nothing."""
    per = before.slots_per_rank
    for layer in range(LAYERS):
        held, serves = after.experts[layer], after.serves[layer]
        served = [e for e, s in zip(held, serves, strict=True) if s]
        assert set(served) == set(range(before.num_experts))
        for slot, expert in enumerate(held):
            if slot // per not in live:
                assert (expert, serves[slot]) == (EMPTY, 0)
            elif before.serves[layer][slot]:
                assert expert == before.experts[layer][slot]
        assert after.missing(live) == ()


def loads(placement: Placement, layer: int, live: set[int]) -> list[int]:
    per = placement.slots_per_rank
    return [sum(map(bool, placement.serves[layer][rank * per : (rank + 1) * per])) for rank in sorted(live)]


@pytest.mark.parametrize(("experts", "slots", "ranks"), SHAPES)
def test_every_loss_and_return(experts: int, slots: int, ranks: int) -> None:
    first = first_placement(LAYERS, experts, slots, range(ranks), ranks)
    everyone = set(range(ranks))
    for gone in range(1, ranks):
        for lost in combinations(range(ranks), gone):
            live = everyone - set(lost)
            after = next_placement(first, live)
            if slots * len(live) < experts:
                assert after is None
                continue
            assert after is not None
            check(first, after, live)
            for layer in range(LAYERS):
                many = loads(after, layer, live)
                assert sum(many) == experts
                assert max(many) <= max(-(-experts // len(live)), *loads(first, layer, everyone))
            back = next_placement(after, everyone, spread=True)
            assert back is not None
            check(after, back, everyone)
            for layer in range(LAYERS):
                many = loads(back, layer, everyone)
                assert sum(many) == experts and max(many) - min(many) <= 1


def test_few_experts_are_read_after_a_loss() -> None:
    """Only those of the lost rank, in equal parts over all layers."""
    first = first_placement(LAYERS, 8, 3, range(4), 4)
    after = next_placement(first, {0, 1, 3})
    assert after is not None
    read = [
        slot // 3
        for layer in range(LAYERS)
        for slot, expert in enumerate(after.experts[layer])
        if expert not in (EMPTY, first.experts[layer][slot])
    ]
    assert len(read) == 2 * LAYERS
    assert sorted(read.count(rank) for rank in (0, 1, 3)) == [2, 2, 2]


def test_spare_copies_serve_first() -> None:
    held, serves = (0, 1, 2, 2, 3, 0), (True, True, False, True, True, False)
    first = Placement(4, 3, (held,), (serves,))
    after = next_placement(first, {1})
    assert after is None  # three slots for four experts
    more = Placement(3, 3, ((0, 1, EMPTY, 2, 1, 0),), ((True, True, False, True, False, False),))
    after = next_placement(more, {1})
    assert after is not None
    assert after.experts == ((EMPTY, EMPTY, EMPTY, 2, 1, 0),)
    assert after.serves == ((False, False, False, True, True, True),)


def test_growth_and_draining() -> None:
    first = first_placement(LAYERS, 8, 5, range(2), 4)
    live: set[int] = {0, 1}
    now = first
    for target in ({0, 1, 2, 3}, {0, 2, 3}, {2, 3}, {1, 2, 3}):
        after = next_placement(now, target, spread=True)
        assert after is not None
        check(now, after, target)
        for layer in range(LAYERS):
            many = loads(after, layer, target)
            assert max(many) - min(many) <= 1
        now, live = after, target
    assert live == {1, 2, 3}
