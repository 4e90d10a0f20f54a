"""Which ranks of a group shall serve, as an operator wants: more, fewer, or without certain ones."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

from ep_server.errors import EpServerError, InvalidArgument, WrongState
from ep_server.exchange.segment import available_memory
from ep_server.ranks.generations import Generations
from ep_server.ranks.group import PROCESS_BYTES
from ep_server.records import RankReady
from ep_server.scheduler.placement import slots_needed
from ep_server.scheduler.regroup import next_placement

HELD = "held out by an operator"


class Places(NamedTuple):
    """most: ranks that there can be. gpus: of the host, one for each rank; 0 = ranks on CPUs."""

    most: int
    gpus: int

    @property
    def ranks(self) -> range:
        """Those that can serve."""
        return range(min(self.most, self.gpus) if self.gpus else self.most)

    def named(self) -> str:
        """What limits them."""
        return f"parallel.max_ranks, {self.gpus} GPUs of this host" if self.gpus else "parallel.max_ranks"


class Wanted(NamedTuple):
    """ranks: that shall serve. held: by an operator's wish out."""

    ranks: frozenset[int]
    held: frozenset[int]

    @staticmethod
    def of(group: Generations) -> Wanted:
        """What scale() has made of a group."""
        return Wanted(group.wanted, group.held)

    def want(self, group: Generations) -> None:
        """Has another group become the same, as soon as it can."""
        group.wanted, group.held = self
        group.out = dict.fromkeys(self.held, HELD)
        group.report()
        group.bring_back()


async def scale(
    group: Generations, count: int, hold_out: frozenset[int], most: int, ready: Collection[RankReady]
) -> float:
    """As Ranks.scale. most: ranks that there can be. ready: some of those that serve."""
    target = _target(group, count, hold_out, Places(most, max((rank.gpus for rank in ready), default=0)))
    joining = target - group.live
    _check_memory(len(joining), ready)
    before = group.wanted, group.held, group.out
    group.wanted, group.held = target, hold_out
    group.out = {rank: why for rank, why in group.out.items() if rank not in target and why != HELD}
    group.out |= dict.fromkeys(hold_out, HELD)
    try:
        pause = await group.join(sorted(joining)) if joining else 0.0
        others = frozenset(range(most)) - target
        await group.let_go(others)
        return max(pause, await group.change(leaves=others))
    except EpServerError:
        if group.live != target:  # else it stands, though a rank was lost while they switched
            lost = {rank: why for rank, why in group.out.items() if why != HELD}
            group.wanted, group.held, group.out = *before[:2], before[2] | lost
            with suppress(EpServerError):
                await group.let_go(joining)
            group.bring_back()  # those that have left already
        raise


def _target(group: Generations, count: int, hold_out: frozenset[int], places: Places) -> frozenset[int]:
    if unknown := sorted(hold_out - set(range(places.most))):
        raise InvalidArgument("hold_out", unknown[0], f"0 to {places.most - 1} (parallel.max_ranks)")
    free = [rank for rank in places.ranks if rank not in hold_out]
    if count > len(free):
        raise InvalidArgument("ranks", count, f"at most {len(free)} ({places.named()}, hold_out)")
    free.sort(key=lambda rank: (rank not in group.live, rank))
    target = frozenset(free[:count]) if count else (group.wanted | group.held) - hold_out
    target &= frozenset(places.ranks)
    if not target:
        raise InvalidArgument("hold_out", sorted(hold_out), "not all ranks")
    if target == group.live:
        return target
    if group.placement is None:
        raise WrongState("experts cannot move: there are no spare slots (resilience.spare_slots)")
    per, experts = group.placement.slots_per_rank, group.placement.num_experts
    if len(target) * per < experts:
        raise WrongState(
            f"{len(target)} ranks have too few expert slots: {per} each for {experts} experts of a layer, so "
            f"at least {slots_needed(experts, per)} must serve (resilience.spare_slots)"
        )
    if next_placement(group.placement, target | group.live) is None:
        raise WrongState("the ranks that serve have too few expert slots (resilience.spare_slots)")
    return target


def _check_memory(more: int, ready: Collection[RankReady]) -> None:
    """Raises: WrongState if so many more ranks do not fit. Those on GPUs check their GPU's memory."""
    each = max((_host_bytes(rank) for rank in ready), default=0) + PROCESS_BYTES
    free = available_memory()
    if more * each > free:
        raise WrongState(
            f"{more} more ranks take {more * each / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free"
        )


def _host_bytes(rank: RankReady) -> int:
    return rank.kv_host_bytes + (0 if rank.gpus else rank.weight_bytes + rank.kv_bytes)
