"""The state of a group of ranks as one literal table, and its generation.

A generation is one fixed set of ranks: no rank leaves or joins within it. Losing one ends it; only a
re-formed group, under the next number, serves again. Knows nothing of processes or health checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ep_server.errors import InternalError


class GroupState(StrEnum):
    """What the group does with requests."""

    STARTING = "starting"  # ranks load; none is taken
    SERVING = "serving"
    DRAINING = "draining"  # those in flight end, none is taken
    LOST = "lost"  # a rank is gone; those in flight have failed


class GroupEvent(StrEnum):
    """What may happen to a group."""

    READY = "ready"  # every rank is warm
    DRAIN = "drain"
    LOSE = "lose"  # a rank died or reported a fatal error
    REFORM = "reform"  # a new set of ranks starts


_TABLE: dict[GroupState, dict[GroupEvent, GroupState]] = {
    GroupState.STARTING: {
        GroupEvent.READY: GroupState.SERVING,
        GroupEvent.DRAIN: GroupState.DRAINING,
        GroupEvent.LOSE: GroupState.LOST,
    },
    GroupState.SERVING: {GroupEvent.DRAIN: GroupState.DRAINING, GroupEvent.LOSE: GroupState.LOST},
    GroupState.DRAINING: {
        GroupEvent.READY: GroupState.DRAINING,  # asked to drain while it was starting
        GroupEvent.DRAIN: GroupState.DRAINING,
        GroupEvent.LOSE: GroupState.LOST,
    },
    GroupState.LOST: {
        GroupEvent.DRAIN: GroupState.LOST,
        GroupEvent.LOSE: GroupState.LOST,  # ranks rarely die alone
        GroupEvent.REFORM: GroupState.STARTING,
    },
}


@dataclass(frozen=True, slots=True)
class Membership:
    """A group of `num_ranks` ranks in its `generation`, which is part of every vote."""

    num_ranks: int
    state: GroupState = GroupState.STARTING
    generation: int = 0

    @property
    def accepts(self) -> bool:
        """New requests are taken."""
        return self.state is GroupState.SERVING

    def after(self, event: GroupEvent, num_ranks: int | None = None) -> Membership:
        """The group after `event`.

        Args:
            num_ranks: of the new set, with REFORM only; as before if None.
        Raises: InternalError for an event the state does not allow.
        """
        try:
            state = _TABLE[self.state][event]
        except KeyError:
            raise InternalError(
                f"generation {self.generation} of the group: event {event} is illegal in state {self.state}"
            ) from None
        if event is not GroupEvent.REFORM:
            if num_ranks is not None:
                raise InternalError(f"event {event} cannot change the number of ranks")
            return Membership(self.num_ranks, state, self.generation)
        return Membership(num_ranks or self.num_ranks, state, self.generation + 1)
