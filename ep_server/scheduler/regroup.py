"""The placement of experts for other live ranks: after a loss, when a rank joins, when one leaves. Pure."""

from __future__ import annotations

from collections.abc import Collection

from ep_server.records import EMPTY
from ep_server.scheduler.placement import Placement


def next_placement(
    now: Placement, live: Collection[int], *, spread: bool = False, copies: bool = False
) -> Placement | None:
    """The experts on other live ranks, with few of them read.

    Spare copies of live ranks begin to serve first. What is missing then goes to the live ranks that serve
    the fewest experts of the layer. Only slots that serve nothing in `now` change what they hold, so the
    change can be prepared while `now` is in force. A slot that serves no more keeps a spare copy.

    Args:
        spread: also move experts from the ranks that serve the most to those that serve the fewest, for ranks
            that have joined.
        copies: fill empty slots with spare copies.
    Returns: None if the live ranks have too few slots.
    """
    layers = []
    for layer in range(len(now.experts)):
        moved = _Layer(now, layer, sorted(live))
        if not moved.complete():
            return None
        if spread:
            moved.spread()
        layers.append(moved)
    made = Placement(
        now.num_experts,
        now.slots_per_rank,
        tuple(tuple(layer.held) for layer in layers),
        tuple(tuple(layer.serves) for layer in layers),
    )
    return made.with_copies(sorted(live)) if copies else made


class _Layer:
    """One layer in the making. held, serves: by slot."""

    def __init__(self, now: Placement, layer: int, live: list[int]) -> None:
        self._per, self._experts = now.slots_per_rank, range(now.num_experts)
        self._turn = {rank: (index + layer) % len(live) for index, rank in enumerate(live)}
        self._load = dict.fromkeys(live, 0)  # experts that a rank serves
        self._free: dict[int, list[int]] = {rank: [] for rank in live}  # slots by rank, spare copies first
        self._serving = [0] * now.num_experts  # slots that serve each expert
        self.held, self.serves = list(now.experts[layer]), list(now.serves[layer])
        for slot, expert in enumerate(self.held):
            rank = slot // self._per
            if rank not in self._load:
                self.held[slot], self.serves[slot] = EMPTY, 0
            elif self.serves[slot]:
                self._load[rank] += 1
                self._serving[expert] += 1
            else:
                self._free[rank].append(slot)
        for slots in self._free.values():
            slots.sort(key=lambda slot: (self.held[slot] == EMPTY, -slot))

    def complete(self) -> bool:
        """Every expert is served by a live rank; False if there is no slot for one."""
        missing = [expert for expert in self._experts if not self._serving[expert]]
        # Those with spare copies first: nothing else may take these slots.
        missing.sort(key=lambda expert: not self._copies(expert, self._load))
        return all(self._serve(expert, self._load) for expert in missing)

    def spread(self) -> None:
        """Until no rank serves two experts more than another, or slots are missing."""
        while True:
            most = max(self._load, key=lambda rank: (self._load[rank], rank))
            least = min(self._load, key=lambda rank: (self._load[rank], self._turn[rank]))
            if self._load[most] - self._load[least] < 2 or not self._move(most, least):
                return

    def _move(self, source: int, target: int) -> bool:
        elsewhere = {self.held[slot] for slot in self._slots(target) if self.serves[slot]}
        for slot in reversed(self._slots(source)):
            expert = self.held[slot]
            if (
                self.serves[slot]
                and expert not in elsewhere
                and self._serve(expert, [target], self.serves[slot])
            ):
                self.serves[slot] = 0
                self._load[source] -= 1
                self._serving[expert] -= 1
                return True
        return False

    def _serve(self, expert: int, ranks: Collection[int], part: int = 1) -> bool:
        """Has a rank serve an expert: one that holds a spare copy, else one with a free slot.

        part: see Placement.serves.
        """
        slots = self._copies(expert, ranks) or [self._free[rank][-1] for rank in ranks if self._free[rank]]
        if not slots:
            return False
        slot = min(slots, key=lambda slot: self._order(slot // self._per))
        rank = slot // self._per
        self._free[rank].remove(slot)
        self.held[slot], self.serves[slot] = expert, part
        self._load[rank] += 1
        self._serving[expert] += 1
        return True

    def _copies(self, expert: int, ranks: Collection[int]) -> list[int]:
        return [slot for rank in ranks for slot in self._free[rank] if self.held[slot] == expert]

    def _order(self, rank: int) -> tuple[int, int]:
        """The rank that serves the fewest first; layers begin with different ranks."""
        return self._load[rank], self._turn[rank]

    def _slots(self, rank: int) -> range:
        return range(rank * self._per, (rank + 1) * self._per)
