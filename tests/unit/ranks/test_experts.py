"""What a rank computes before it switches to another placement, and what in the switch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ep_server.orders import PrepareGeneration
from ep_server.ranks import experts as module
from ep_server.ranks.experts import RankExperts, routes_of
from ep_server.scheduler.placement import first_placement
from ep_server.scheduler.regroup import next_placement

FIRST = first_placement(2, 4, 4, (0, 1), 3)


def made() -> tuple[RankExperts, list[Any]]:
    """Rank 0 of 0 and 1, of three that there can be; and the routes that its runner gets."""
    placed: list[Any] = []
    runner: Any = SimpleNamespace(place=lambda routes, held: placed.append((routes.tolist(), held)))
    params: Any = SimpleNamespace(rank=0, held=FIRST.of_rank(0))
    experts = RankExperts(params, runner, lambda params, moves, **_: 0)
    experts.use(FIRST, (0, 1))
    return experts, placed


@pytest.mark.parametrize("live", [(0, 1), (0, 1, 2), (0,)])
def test_routes_are_computed_before_the_switch(
    live: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, placed = made()
    target = next_placement(FIRST, live, spread=True, copies=True)
    assert target is not None
    if live == (0, 1):
        change = experts.change(target)
    else:
        order = PrepareGeneration(1, 1, live, target)
        change = experts.generation(order, lambda: experts.use(order.placement, order.live))
    change.prepare()
    assert change.needs_idle == (live != (0, 1)), "routes alone change behind the steps in flight"
    monkeypatch.setattr(module, "routes_of", lambda *_: pytest.fail("computed in the switch"))
    change.apply()
    assert placed[-1] == ([list(map(list, layer)) for layer in routes_of(target, 0, live)], target.of_rank(0))
    assert experts.placement is target and experts.live == set(live)


def test_routes_of_a_dropped_change_are_not_used() -> None:
    """The switch is to other ranks than the change was for: one was lost meanwhile."""
    experts, placed = made()
    target = next_placement(FIRST, (0, 1, 2), spread=True)
    assert target is not None
    experts.generation(PrepareGeneration(1, 1, (0, 1, 2), target), lambda: None).prepare()
    alone = next_placement(FIRST, (0,))
    assert alone is not None
    experts.load(alone, idle=True)
    experts.use(alone, (0,))
    assert placed[-1][0] == [list(map(list, layer)) for layer in routes_of(alone, 0, {0})]
