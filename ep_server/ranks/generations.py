"""Generations of a group of ranks: which take part, and what a regroup of them has reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ep_server.ranks.group import GroupPlan
from ep_server.ranks.protocol import GroupState


@dataclass(slots=True)
class Regrouping:
    """One regroup of a group.

    leaving: lost ranks whose processes have not ended. replaced: processes. done: ranks that have regrouped.
    over: it has succeeded.
    """

    generation: int
    leaving: set[int] = field(default_factory=set)
    replaced: int = 0
    done: set[int] = field(default_factory=set)
    over: bool = False


def group_state(generation: int, live: Sequence[int], plan: GroupPlan) -> GroupState:
    """What the engine gets to know of a generation."""
    return GroupState(generation, tuple(live), plan.spares.lacking_bytes(len(live)), plan.placement)
