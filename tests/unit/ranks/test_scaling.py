"""What an operator wants of ranks, checked and kept, over a group that fails at chosen moments."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from ep_server.errors import InvalidArgument, Unavailable
from ep_server.ranks.scaling import scale
from ep_server.scheduler.placement import Placement


class Group:
    """Ranks 0 and 1 of 4 experts each. late: a rank is lost after the switch, else before it."""

    def __init__(self, *, late: bool) -> None:
        self.live = self.wanted = frozenset({0, 1})
        self.held, self.out = frozenset[int](), dict[int, str]()
        self.placement = Placement(4, 4, ((*range(4), *range(4)),), ((1,) * 4 + (0,) * 4,))
        self._late = late

    async def join(self, ranks: Collection[int]) -> float:
        raise AssertionError(ranks)

    async def change(self, live: Collection[int]) -> float:
        if self._late:
            self.live = frozenset(live)
        raise Unavailable("a rank was lost")


@pytest.mark.parametrize("late", [False, True])
async def test_a_change_that_stands_is_wanted(late: bool) -> None:
    """Else the rank that left would be brought back, though it was held out."""
    group: Any = Group(late=late)
    with pytest.raises(Unavailable):
        await scale(group, 0, frozenset({1}), 2, [])
    assert group.wanted == group.live == (frozenset({0}) if late else frozenset({0, 1}))
    assert set(group.out) == group.held == ({1} if late else set())


async def test_ranks_that_cannot_be_are_not_held_out() -> None:
    group: Any = Group(late=True)
    with pytest.raises(InvalidArgument, match="hold_out = 2: must be 0 to 1"):
        await scale(group, 0, frozenset({0, 2, 9}), 2, [])
    assert not group.held and not group.out
