"""Which ranks of a group shall serve, as an operator wants: more, fewer, or without certain ones."""

from __future__ import annotations

from collections.abc import Collection

from ep_server.errors import EpServerError, InvalidArgument, WrongState
from ep_server.exchange.segment import available_memory
from ep_server.ranks.generations import Generations
from ep_server.ranks.group import PROCESS_BYTES
from ep_server.records import RankReady
from ep_server.scheduler.regroup import next_placement

HELD = "held out by an operator"


async def scale(
    group: Generations, count: int, hold_out: frozenset[int], most: int, ready: Collection[RankReady]
) -> float:
    """As Ranks.scale. most: ranks that there can be. ready: some of those that serve."""
    target = _target(group, count, hold_out, most)
    joining = target - group.live
    _check_memory(len(joining), ready)
    before = group.wanted, group.held, group.out
    group.wanted, group.held = target, hold_out
    group.out = {rank: why for rank, why in group.out.items() if rank not in target and why != HELD}
    group.out |= dict.fromkeys(hold_out, HELD)
    try:
        pause = await group.join(sorted(joining)) if joining else 0.0
        return max(pause, await group.change(target))
    except EpServerError:
        if group.live != target:  # else it stands, though a rank was lost while they switched
            group.wanted, group.held, group.out = before
        raise


def _target(group: Generations, count: int, hold_out: frozenset[int], most: int) -> frozenset[int]:
    if unknown := sorted(hold_out - set(range(most))):
        raise InvalidArgument("hold_out", unknown[0], f"0 to {most - 1} (parallel.max_ranks)")
    free = [rank for rank in range(most) if rank not in hold_out]
    if count > len(free):
        raise InvalidArgument("ranks", count, f"at most {len(free)} (parallel.max_ranks, hold_out)")
    free.sort(key=lambda rank: (rank not in group.live, rank))
    target = frozenset(free[:count]) if count else (group.wanted | group.held) - hold_out
    target &= frozenset(range(most))
    if not target:
        raise InvalidArgument("hold_out", sorted(hold_out), "not all ranks")
    if target == group.live:
        return target
    if group.placement is None:
        raise WrongState("experts cannot move: there are no spare slots (resilience.spare_slots)")
    if len(target) * group.placement.slots_per_rank < group.placement.num_experts:
        raise WrongState(f"{len(target)} ranks have too few expert slots (resilience.spare_slots)")
    if next_placement(group.placement, target | group.live) is None:
        raise WrongState("the ranks that serve have too few expert slots (resilience.spare_slots)")
    return target


def _check_memory(more: int, ready: Collection[RankReady]) -> None:
    """Raises: WrongState if so many more ranks do not fit."""
    each = max((rank.weight_bytes + rank.kv_bytes for rank in ready), default=0) + PROCESS_BYTES
    free = available_memory()
    if more * each > free:
        raise WrongState(
            f"{more} more ranks take {more * each / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free"
        )
