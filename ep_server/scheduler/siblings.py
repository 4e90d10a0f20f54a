"""Sequences of one request on a rank: the first prefills, the others wait and then share its prompt's blocks.

Data and rules only; the scheduler queues what these calls return. A sequence that has nothing to share, or
whose request has no other sequence, never waits here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ep_server.errors import InternalError
from ep_server.scheduler.sequence import ScheduledSequence


@dataclass(slots=True)
class _Group:
    """first: prefills the prompt; None once its blocks can be shared. held: wait for that. live: members."""

    first: ScheduledSequence | None
    held: list[ScheduledSequence] = field(default_factory=list)
    live: int = 0


class Siblings:
    """The groups of a rank, by Request.group."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._held = 0

    def __len__(self) -> int:
        """Sequences that wait here."""
        return self._held

    def join(self, seq: ScheduledSequence) -> bool:
        """A sequence arrives. Returns: whether to queue it; if not, another call returns it."""
        if not seq.shares:
            return True
        group = self._groups.setdefault(seq.request.group, _Group(seq))
        group.live += 1
        if group.first is None or group.first is seq:
            return True
        group.held.append(seq)
        self._held += 1
        return False

    def awaits(self, seq: ScheduledSequence) -> bool:
        """The others wait for the prefill of this sequence."""
        group = self._groups.get(seq.request.group) if seq.shares else None
        return group is not None and group.first is seq

    def prefilled(self, seq: ScheduledSequence) -> list[ScheduledSequence]:
        """The step that ends its prefill is planned. Returns: those to queue now."""
        group = self._groups[seq.request.group]
        group.first = None
        return self._release(group, len(group.held))

    def leave(self, seq: ScheduledSequence) -> list[ScheduledSequence]:
        """A sequence ended. Returns: those to queue now, of which the first prefills if it was to."""
        group = self._groups.get(seq.request.group) if seq.shares else None
        if group is None:
            return []
        group.live -= 1
        if not group.live:
            del self._groups[seq.request.group]
        if self.holds(seq):
            group.held.remove(seq)
            self._held -= 1
        elif group.first is seq and group.held:
            group.first = group.held[0]
            return self._release(group, 1)
        return []

    def holds(self, seq: ScheduledSequence) -> bool:
        """The sequence waits here."""
        group = self._groups.get(seq.request.group) if seq.shares else None
        return group is not None and any(seq is held for held in group.held)

    def is_last(self, seq: ScheduledSequence) -> bool:
        """No other sequence of its request is left."""
        return seq.request.group not in self._groups

    def check_integrity(self) -> None:
        """Raises InternalError if a group is inconsistent."""
        for number, group in self._groups.items():
            first = group.first
            if (group.held and first is None) or group.live < len(group.held):
                raise InternalError(f"group {number}: {group.held} wait for nobody")
            if first is not None and (first.state.ended or any(seq is first for seq in group.held)):
                raise InternalError(f"group {number} waits for {first!r}")
            if any(not seq.waits or seq.blocks for seq in group.held):
                raise InternalError(f"group {number} holds {group.held}, which run")
        if self._held != sum(len(group.held) for group in self._groups.values()):
            raise InternalError(f"{self._held} sequences are held by their groups")

    def _release(self, group: _Group, count: int) -> list[ScheduledSequence]:
        released, group.held = group.held[:count], group.held[count:]
        self._held -= len(released)
        return released
