"""One layer while its next placement is chosen: what ranks get, and which shares and copies would level that.

An expert's tokens are divided into WAYS parts among its slots. With unequal shares each copy can fill one
rank up to the mean. Changed shares cost nothing; a copy where there is none is a load.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, sqrt
from typing import NamedTuple

from ep_server.errors import InternalError
from ep_server.records import EMPTY, WAYS
from ep_server.scheduler.placement import Placement

NOISE = 3.0  # standard deviations of a rank's rows; a smaller imbalance may be chance
WORTH = 0.5  # of what a load would level: a spare copy that serves takes a slot from a more popular expert
NEARLY = 0.8  # a whole expert is moved rather than a part of one if it levels at least so much of it
RECEIVERS = 4  # least loaded ranks considered for a new copy


@dataclass(frozen=True, slots=True)
class BalanceLimits:
    """When and how much to change.

    moves: experts to load in one plan, at most.
    act_above, aim: a layer is changed if its imbalance (maximum / mean rows of live ranks) exceeds act_above,
      and then until it is at most aim. The gap keeps a layer from changing again soon.
    gain: by which the rows beyond act_above must shrink, over all ranks, in means: or the layer stays. A plan
      that prepares the next one may raise the imbalance by so much.
    copies: serving copies of a layer, at most; None: as many as slots.
    keep_coverage: while every expert lies on two live ranks, keep it so: any one rank may be lost.
    """

    moves: int = 64
    act_above: float = 1.03
    aim: float = 1.01
    gain: float = 0.01
    copies: int | None = None
    keep_coverage: bool = True


def imbalance(loads: Collection[float]) -> float:
    """Maximum over mean; 1 without any rows."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


class _Shift(NamedTuple):
    """Parts of an expert's tokens from a slot to another rank. score: rows that it levels, weighted."""

    score: float
    slot: int
    rank: int
    parts: int


@dataclass(slots=True)
class LayerDraft:
    """See above.

    parts: by slot, of WAYS for each expert. loads: rows by live rank. fixed: slots that the current placement
    serves from. loaded: by slot, what it held before the expert that it is to hold.
    """

    rows: Sequence[float]
    slots_per_rank: int
    experts: list[int]
    parts: list[int]
    loads: dict[int, float]
    fixed: frozenset[int]
    covered: bool
    loaded: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def of(
        placement: Placement, layer: int, rows: Sequence[float], live: tuple[int, ...], covered: bool
    ) -> LayerDraft:
        """As it is now. covered: two copies of each expert must stay. Raises: InternalError as _parts()."""
        experts, serves = placement.experts[layer], placement.serves[layer]
        draft = LayerDraft(
            rows,
            placement.slots_per_rank,
            list(experts),
            _parts(placement, layer, live),
            dict.fromkeys(live, 0.0),
            frozenset(slot for slot, part in enumerate(serves) if part),
            covered,
        )
        for slot, part in enumerate(draft.parts):
            if part:
                draft.loads[draft._rank(slot)] += draft._unit(slot) * part
        return draft

    def _rank(self, slot: int) -> int:
        return slot // self.slots_per_rank

    def _slots(self, rank: int) -> range:
        return range(rank * self.slots_per_rank, (rank + 1) * self.slots_per_rank)

    def _unit(self, slot: int) -> float:
        """Rows of one part of its expert's tokens."""
        return self.rows[self.experts[slot]] / WAYS

    @property
    def _mean(self) -> float:
        return sum(self.loads.values()) / len(self.loads)

    def excess(self) -> float:
        """Rows of the most loaded rank beyond the mean: what the others wait for."""
        return max(self.loads.values()) - self._mean

    def reduced_parts(self) -> tuple[int, ...]:
        """Parts by slot in the least whole numbers: 1 where one slot has all."""
        divisors = dict.fromkeys(self.experts, 0)
        for slot, part in enumerate(self.parts):
            divisors[self.experts[slot]] = gcd(divisors[self.experts[slot]], part)
        return tuple(part and part // divisors[self.experts[slot]] for slot, part in enumerate(self.parts))

    def improved(self, limits: BalanceLimits, moves: int) -> LayerDraft | None:
        """A better layer, with at most so many loads; None if it should stay as it is."""
        mean, imbalanced = self._mean, imbalance(self.loads.values())
        if not mean or imbalanced <= max(limits.act_above, 1 + NOISE / sqrt(mean)):
            return None
        draft, before = self._copy(self.fixed), self._overload(limits.act_above)
        draft._level(limits, moves)
        after = draft._overload(limits.act_above)
        if after and moves <= len(draft.loaded):
            # The next plan goes on, before spare copies take the slots.
            return draft if draft.loaded else None
        if after:
            roomy = draft._copy(self.fixed)
            roomy._make_room(moves, max(self.loads.values()) + limits.gain * mean)
            later = roomy._copy(frozenset(slot for slot, part in enumerate(roomy.parts) if part))
            later.loaded.clear()
            later._level(limits, moves)
            if min(before, after) - later._overload(limits.act_above) >= limits.gain:
                return roomy
        return draft if before - after >= limits.gain else None

    def _overload(self, allowed: float) -> float:
        """Rows beyond the allowed multiple of the mean, of all ranks, in means."""
        return sum(max(0.0, load / self._mean - allowed) for load in self.loads.values())

    def _level(self, limits: BalanceLimits, moves: int) -> None:
        copies = limits.copies or len(self.parts)
        goal = self._goal(limits.aim, copies)
        while max(self.loads.values()) > goal:
            spare = sum(map(bool, self.parts)) < copies
            free, load = self._best(goal, 0, spare), self._best(goal, moves - len(self.loaded), spare)
            shift = free if free and (load is None or free.score >= WORTH * load.score) else load
            if shift is None:
                break
            self._shift(shift)
        self._merge(goal)
        self._forget_unused()

    def _goal(self, aim: float, copies: int) -> float:
        """Rows of a rank to reach: aim, or what so many copies can reach with the most popular experts."""
        ways, extra = [1] * len(self.rows), copies - len(self.rows)
        for _ in range(max(extra, 0)):
            ways[self._largest(ways)] += 1
        largest = self._largest(ways)
        return max(aim * self._mean, self.rows[largest] / ways[largest])

    def _largest(self, ways: list[int]) -> int:
        return max(range(len(ways)), key=lambda expert: self.rows[expert] / ways[expert])

    def _copy(self, fixed: frozenset[int]) -> LayerDraft:
        experts, parts, loads, loaded = self.experts[:], self.parts[:], self.loads.copy(), self.loaded.copy()
        return replace(self, experts=experts, parts=parts, loads=loads, loaded=loaded, fixed=fixed)

    def _best(self, goal: float, moves: int, spare: bool) -> _Shift | None:
        """The shift off the most loaded rank that levels the most; with a load only if moves are left."""
        hot = max(self.loads, key=lambda rank: (self.loads[rank], -rank))
        receivers = self._receivers(goal) if moves > 0 else ()
        best: _Shift | None = None
        holders = self._all_holders()
        for slot in self._slots(hot):
            if self.parts[slot] and self._unit(slot):
                for shift in self._shifts(slot, goal, receivers, spare, holders[self.experts[slot]]):
                    if best is None or shift.score > best.score:
                        best = shift
        return best

    def _receivers(self, goal: float) -> tuple[int, ...]:
        """The least loaded ranks that can load an expert."""
        found: list[int] = []
        for rank in sorted(self.loads, key=lambda rank: (self.loads[rank], rank)):
            if self.loads[rank] >= goal or len(found) == RECEIVERS:
                break
            if self._free_slot(rank) is not None:
                found.append(rank)
        return tuple(found)

    def _shifts(
        self, slot: int, goal: float, receivers: tuple[int, ...], spare: bool, holders: dict[int, int]
    ) -> Iterator[_Shift]:
        """From a slot to ranks that hold its expert, or else to receivers, that lower the higher load."""
        all_parts, unit, here = self.parts[slot], self._unit(slot), self.loads[self._rank(slot)]
        for rank in receivers or holders:
            there = self.loads[rank]
            if rank == self._rank(slot) or there >= goal:
                continue
            if receivers and rank in holders:
                continue
            fitting = round(min(here - goal, goal - there) / unit)
            for parts in {min(max(fitting, 1), all_parts), all_parts}:
                levelled = here - max(here - parts * unit, there + parts * unit)
                joins = parts == all_parts or (rank in holders and self.parts[holders[rank]])
                if levelled > 0 and (joins or spare):
                    yield _Shift(levelled * (1 if joins else NEARLY), slot, rank, parts)

    def _holders(self, expert: int) -> dict[int, int]:
        """By live rank, the slot that holds an expert; one that serves, if there are two."""
        return self._all_holders()[expert]

    def _all_holders(self) -> list[dict[int, int]]:
        """By expert: see _holders()."""
        found: list[dict[int, int]] = [{} for _ in self.rows]
        for rank in self.loads:
            for slot in self._slots(rank):
                if (expert := self.experts[slot]) != EMPTY:
                    held = found[expert]
                    if rank not in held or not self.parts[held[rank]]:
                        held[rank] = slot
        return found

    def _shift(self, shift: _Shift) -> None:
        expert = self.experts[shift.slot]
        target = self._holders(expert).get(shift.rank)
        if target is None:
            target = self._load(expert, shift.rank)
        self._reassign(shift.slot, target, shift.parts)

    def _load(self, expert: int, rank: int) -> int:
        slot = self._free_slot(rank)
        if slot is None:
            raise InternalError(f"rank {rank} has no free slot for expert {expert}")
        self.loaded[slot] = self.experts[slot]
        self.experts[slot] = expert
        return slot

    def _reassign(self, source: int, target: int, parts: int) -> None:
        rows = self._unit(source) * parts
        self.parts[source] -= parts
        self.parts[target] += parts
        self.loads[self._rank(source)] -= rows
        self.loads[self._rank(target)] += rows

    def _free_slot(self, rank: int) -> int | None:
        """The slot of a rank to load into: an empty one, or else the spare copy with the fewest rows."""
        return min(self._free_slots(rank), key=lambda slot: (self._rows_of(slot), slot), default=None)

    def _free_slots(self, rank: int) -> list[int]:
        """Slots that nobody serves from, now or next."""
        idle = (slot for slot in self._slots(rank) if not self.parts[slot])
        return [s for s in idle if s not in self.fixed and s not in self.loaded and self._is_expendable(s)]

    def _rows_of(self, slot: int) -> float:
        expert = self.experts[slot]
        return -1.0 if expert == EMPTY else self.rows[expert]

    def _is_expendable(self, slot: int, more: int = 0) -> bool:
        """Its copy is not one of the last two, if two must stay. more: other copies that are to be loaded."""
        expert = self.experts[slot]
        if not self.covered or expert == EMPTY:
            return True
        elsewhere = {self._rank(o) for o, held in enumerate(self.experts) if held == expert and o != slot}
        return len(elsewhere & self.loads.keys()) + more >= 2

    def _merge(self, goal: float) -> None:
        """Give the parts of small copies to other copies of their expert where those ranks stay within goal.

        A copy that serves few rows costs its rank the reading of its weights, and a slot.
        """
        serving = [slot for slot, part in enumerate(self.parts) if 0 < part < WAYS]
        for slot in sorted(serving, key=lambda slot: (self._unit(slot) * self.parts[slot], slot)):
            rows = self._unit(slot) * self.parts[slot]
            others = [other for other in self._holders(self.experts[slot]).values() if self.parts[other]]
            fits = [o for o in others if o != slot and self.loads[self._rank(o)] + rows <= goal]
            if fits:
                target = min(fits, key=lambda other: (self.loads[self._rank(other)], other))
                self._reassign(slot, target, self.parts[slot])

    def _forget_unused(self) -> None:
        """Drop loads of copies that do not serve after all."""
        for slot in [slot for slot in self.loaded if not self.parts[slot]]:
            self.experts[slot] = self.loaded.pop(slot)

    def _make_room(self, moves: int, most: float) -> None:
        """Move the coldest expert off each rank below the mean without a free slot, for the next plan to use.

        The slot is left empty: with its old copy, moving the expert back would seem to cost nothing. No rank
        gets more than `most` rows.
        """
        for rank in sorted(self.loads, key=lambda rank: (self.loads[rank], rank)):
            if len(self.loaded) >= moves or self.loads[rank] >= self._mean:
                return
            movable = [s for s in self._slots(rank) if self.parts[s] == WAYS and self._is_expendable(s, 1)]
            if movable and not self._has_room(rank):
                self._move_whole(min(movable, key=lambda slot: (self._unit(slot), slot)), most)

    def _move_whole(self, slot: int, most: float) -> None:
        """Move an expert to a rank that holds it, or else has the most free slots; the slot is left empty."""
        holders = self._holders(self.experts[slot]) if self._is_expendable(slot) else {}
        expert = self.experts[slot]
        fits = [r for r in self.loads if r != self._rank(slot) and self.loads[r] + self.rows[expert] <= most]
        room = {rank: len(self._free_slots(rank)) for rank in fits}
        if targets := [rank for rank in fits if rank in holders or room[rank]]:
            to = max(targets, key=lambda rank: (rank in holders, room[rank], -self.loads[rank], -rank))
            target = holders[to] if to in holders else self._load(expert, to)
            self._reassign(slot, target, WAYS)
            self.experts[slot] = EMPTY

    def _has_room(self, rank: int) -> bool:
        """Whether the next plan can load into a slot of a rank."""
        return any(not self.parts[slot] and self._is_expendable(slot) for slot in self._slots(rank))


def _parts(placement: Placement, layer: int, live: tuple[int, ...]) -> list[int]:
    """By slot of a layer: its part of WAYS, by the shares of the live slots that serve its expert.

    Raises: InternalError if no live rank serves an expert.
    """
    serving: dict[int, dict[int, int]] = {expert: {} for expert in range(placement.num_experts)}
    for slot, part in enumerate(placement.serves[layer]):
        if part and slot // placement.slots_per_rank in live:
            serving[placement.experts[layer][slot]][slot] = part
    parts = [0] * len(placement.serves[layer])
    for expert, shares in serving.items():
        if not shares:
            raise InternalError(f"layer {layer}: no live rank serves expert {expert}")
        done, total = 0, sum(shares.values())
        for slot, share in shares.items():
            parts[slot] = (done + share) * WAYS // total - done * WAYS // total
            done += share
    return parts
