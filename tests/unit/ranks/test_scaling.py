"""What an operator wants of ranks, checked and kept, over a group that fails at chosen moments."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from ep_server.errors import InvalidArgument, Unavailable, WrongState
from ep_server.ranks.scaling import scale
from ep_server.records import RankReady
from ep_server.scheduler.placement import Placement

OFTEN = "lost 2 times within 600 s"


class Group:
    """Ranks 0 and 1 of 4 experts each.

    late: a rank is lost after the switch, else before it. often: one that was lost too often.
    """

    def __init__(self, *, late: bool = False, slots: int = 4, often: int | None = None) -> None:
        self.live = self.wanted = frozenset({0, 1})
        self.held, self.out = frozenset[int](), dict[int, str]()
        held = (*range(4), *range(4))[: 2 * slots]
        self.placement = Placement(4, slots, (held,), ((1,) * 4 + (0,) * (2 * slots - 4),))
        self._late, self._often = late, often

    async def join(self, ranks: Collection[int]) -> float:
        raise AssertionError(ranks)

    async def let_go(self, ranks: Collection[int]) -> None:
        assert self.wanted.isdisjoint(ranks)

    def bring_back(self) -> None:
        assert self.wanted == frozenset({0, 1})

    async def change(self, *, leaves: Collection[int]) -> float:
        if self._late:
            self.live -= set(leaves)
        if self._often is not None:
            self.out[self._often] = OFTEN
        raise Unavailable("a rank was lost")


async def test_a_change_that_fails_forgets_no_loss() -> None:
    """A rank that was lost too often meanwhile stays out."""
    group: Any = Group(often=0)
    with pytest.raises(Unavailable):
        await scale(group, 0, frozenset({1}), 2, [])
    assert group.out == {0: OFTEN} and not group.held


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


def ready(rank: int, gpus: int) -> RankReady:
    """Of a rank with weights and KV cache for which no host has memory."""
    return RankReady(rank, 0, 8, 16, 1 << 60, 1 << 60, 0, 0.0, gpus=gpus)


@pytest.mark.parametrize(("most", "gpus", "allowed"), [(4, 2, 2), (2, 8, 2), (3, 3, 3)])
async def test_each_rank_needs_a_gpu_of_its_own(most: int, gpus: int, allowed: int) -> None:
    group: Any = Group()
    with pytest.raises(
        InvalidArgument, match=rf"at most {allowed} \(parallel.max_ranks, {gpus} GPUs of this"
    ):
        await scale(group, allowed + 1, frozenset(), most, [ready(0, gpus), ready(1, gpus)])
    assert group.wanted == group.live


async def test_memory_of_gpus_is_not_that_of_the_host() -> None:
    group: Any = Group()
    with pytest.raises(AssertionError, match="2"):  # it goes on to start the rank
        await scale(group, 3, frozenset(), 4, [ready(0, 4)])
    group = Group()
    with pytest.raises(WrongState, match="GiB are free"):
        await scale(group, 3, frozenset(), 4, [ready(0, 0)])


async def test_the_error_says_how_many_must_serve() -> None:
    group: Any = Group(slots=2)
    with pytest.raises(WrongState, match=r"2 each for 4 experts of a layer, so at least 2 must serve"):
        await scale(group, 1, frozenset(), 2, [])
