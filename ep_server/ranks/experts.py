"""The experts of a rank that serves: which its slots hold, how others get there, and when they serve.

Slots of the exchange are its physical experts. Tables lead from a router's experts to slots, so experts move
without a change of the exchange, of addresses or of captured graphs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np

from ep_server.backends.assembly import LoadParams
from ep_server.errors import InternalError, Unavailable
from ep_server.models.experts import SlotMove
from ep_server.orders import PrepareGeneration
from ep_server.ranks.changes import Change, Prepared
from ep_server.ranks.parts import AnyRunner
from ep_server.records import EMPTY, WAYS
from ep_server.scheduler.placement import Placement

log = logging.getLogger(__name__)

AT_ONCE = 16  # experts read between two looks whether reading shall end
REST_SECONDS = 0.0005  # between the routes of two layers: other threads of this process run steps

Planned = tuple[Placement, frozenset[int], np.ndarray]  # placement, live ranks, their routes


class Load(Protocol):
    """Reads experts into slots."""

    def __call__(
        self,
        params: LoadParams,
        moves: Sequence[SlotMove],
        *,
        beside: bool,
        alive: Callable[[], None] = ...,
    ) -> int:
        """beside: slowly, beside steps that run. alive: called now and then.

        Returns: how many came from host memory.
        """
        ...


class RankExperts:
    """The slots of one rank. Used in the thread of its loop; change().prepare() in another one.

    params: how this rank's weights are loaded now. now: placement in force, and ranks that take part.
    changed: set by use(); one thread may wait for it and clear it. waits: to take part; no slot is in use.
    """

    def __init__(self, params: LoadParams, runner: AnyRunner, load: Load) -> None:
        """use() follows."""
        self.now: tuple[Placement | None, frozenset[int]] = None, frozenset()  # replaced as one
        self.changed = threading.Event()
        self.waits = False
        self._params, self._runner, self._load = params, runner, load
        self._held = [list(layer) for layer in params.held or ()]  # really, spare copies too
        self._planned: Planned | None = None
        self._loading = threading.Condition(threading.Lock())
        self._hurry = threading.Event()  # who uses slots in the background shall end, and not begin

    @property
    def placement(self) -> Placement | None:
        """In force."""
        return self.now[0]

    @property
    def live(self) -> frozenset[int]:
        """Ranks that take part."""
        return self.now[1]

    @property
    def params(self) -> LoadParams:
        """As load_model() takes them, for weights of the same slots."""
        return replace(self._params, held=tuple(tuple(layer) for layer in self._held))

    def loaded_from(self, path: str, version: int, files: str) -> None:
        """The weights in force are those of another checkpoint."""
        self._params = replace(self._params, path=path, version=version, files=files)

    def served_slots(self) -> list[SlotMove]:
        """Slots whose experts this rank serves, as the first live rank that does."""
        placement, live = self.now
        assert placement is not None
        return first_served(placement, self._params.rank, live)

    def load(self, target: Placement, *, idle: bool, alive: Callable[[], None] = lambda: None) -> int:
        """Reads the experts that `target` gives this rank and that its slots lack.

        Args:
            idle: no step is in flight, so any slot may change, and whoever reads in the background ends.
                Else only slots that do not serve now.
            alive: called in this thread now and then, if idle.
        Returns: how many were read. Raises: CheckpointError; Unavailable for a slot in use, or if reading had
            to end.
        """
        if idle:
            self._hurry.set()
        with self._loading:
            self._hurry.clear()
            self._loading.notify_all()
            moves, beside = self._moves(target), not idle and not self.waits
            if beside:
                self._check_free(moves)
            began, copied = time.monotonic(), 0
            at_once = max(len(moves), 1) if idle else 1 if beside else AT_ONCE
            for first in range(0, len(moves), at_once):
                if self._hurry.is_set():
                    raise Unavailable("experts are read for a new generation instead")
                copied += self._read(moves[first : first + at_once], beside, alive)
            log.info(
                "loaded %d experts in %.2f s, %d of them from the host shadow",
                len(moves),
                time.monotonic() - began,
                copied,
            )
            return len(moves)

    @contextmanager
    def kept(self, slots: Sequence[SlotMove]) -> Iterator[list[SlotMove]]:
        """Those of the slots that hold these experts; none of them changes within. In any thread.

        It waits for a load that waits for idle slots: locks are not fair.
        """
        with self._loading:
            self._loading.wait_for(lambda: not self._hurry.is_set())
            yield [one for one in slots if self._held[one.layer][one.slot] == one.expert]

    def use(self, target: Placement, live: Collection[int]) -> None:
        """From the next launch on, tokens take the routes of `target` to these ranks."""
        self.now, planned = (target, frozenset(live)), self._planned
        if planned is None or planned[0] is not target or planned[1] != self.live:
            planned = self.plan(target, self.live)
        self._planned = None
        self._runner.place(planned[2], target.of_rank(self._params.rank))
        self.changed.set()

    def plan(self, target: Placement, live: Collection[int], rest: float = 0.0) -> Planned:
        """Computes the routes for use(), maybe in another thread: it is no work of the switch.

        rest: seconds between two layers.
        """
        routes = routes_of(target, self._params.rank, live, rest)
        self._planned = target, frozenset(live), routes
        return self._planned

    def change(self, target: Placement) -> Change:
        """A change to another placement on the same ranks."""
        return _NewPlacement(self, target, self.live, None)

    def generation(self, order: PrepareGeneration, enter: Callable[[], None]) -> Change:
        """A change to other live ranks. enter: regroups this rank with them."""
        return _NewPlacement(self, order.placement, order.live, enter)

    def rows(self) -> tuple[int, ...]:
        """Rows received by layer and by expert, end to end."""
        return tuple(self._runner.expert_rows().ravel().tolist())

    def _moves(self, target: Placement) -> list[SlotMove]:
        return [
            SlotMove(layer, slot, expert)
            for layer, wanted in enumerate(target.of_rank(self._params.rank))
            for slot, expert in enumerate(wanted)
            if expert not in (EMPTY, self._held[layer][slot])
        ]

    def _check_free(self, moves: Sequence[SlotMove]) -> None:
        assert self.placement is not None
        first = self._params.rank * self.placement.slots_per_rank
        for move in moves:
            if self.placement.serves[move.layer][first + move.slot]:
                raise Unavailable(f"layer {move.layer}: slot {first + move.slot} serves an expert")

    def _read(self, moves: Sequence[SlotMove], beside: bool, alive: Callable[[], None]) -> int:
        for move in moves:
            self._held[move.layer][move.slot] = EMPTY
        copied = self._load(self._params, moves, beside=beside, alive=alive)
        for move in moves:
            self._held[move.layer][move.slot] = move.expert
        return copied


class _NewPlacement:
    """See Change. enter: the change is one of generations."""

    def __init__(
        self,
        experts: RankExperts,
        target: Placement,
        live: Collection[int],
        enter: Callable[[], None] | None,
    ) -> None:
        self._experts, self._target, self._live, self._enter = experts, target, live, enter
        self.what = "another placement of experts" if enter is None else f"for ranks {sorted(live)} to serve"
        self.outlives_loss = enter is None  # else the regroup after the loss says who is live
        self.needs_idle = enter is not None  # routes alone change behind the steps in flight

    def prepare(self) -> Prepared:
        """Reads what is missing. Raises: as RankExperts.load(); InternalError for other slots."""
        held = self._experts.placement
        if held is None or (held.num_experts, held.slots_per_rank, held.num_ranks) != (
            self._target.num_experts,
            self._target.slots_per_rank,
            self._target.num_ranks,
        ):
            raise InternalError("the placement is of another number of experts or slots")
        self._experts.load(self._target, idle=False)
        self._experts.plan(self._target, self._live, REST_SECONDS)
        return Prepared()

    def apply(self) -> None:
        """Tokens take the new routes."""
        if self._enter is None:
            self._experts.use(self._target, self._experts.live)
        else:
            self._enter()


def first_served(placement: Placement, rank: int, live: Collection[int]) -> list[SlotMove]:
    """Slots of a rank that serve an expert which no live rank of a lower number serves."""
    per, found = placement.slots_per_rank, []
    for layer, (held, serves) in enumerate(zip(placement.experts, placement.serves, strict=True)):
        firsts: dict[int, int] = {}
        for slot, expert in enumerate(held):
            if serves[slot] and slot // per in live:
                firsts.setdefault(expert, slot)
        found += [SlotMove(layer, s % per, expert) for expert, s in firsts.items() if s // per == rank]
    return found


def routes_of(placement: Placement, rank: int, live: Collection[int], rest: float = 0.0) -> np.ndarray:
    """[layers, E, WAYS] int32: the routes of all layers; equal layers are computed once.

    rest: seconds between two layers, in which other threads run.
    """
    layers = len(placement.experts)
    table = np.empty((layers, WAYS, placement.num_experts), dtype=np.int32)  # as SlotTable keeps it
    made: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for layer, key in enumerate(zip(placement.experts, placement.serves, strict=True)):
        if (like := made.setdefault(key, layer)) != layer:
            table[layer] = table[like]
            continue
        table[layer] = np.array(placement.routes(layer, rank, WAYS, live), dtype=np.int32).T
        if rest:
            time.sleep(rest)
    return table.transpose(0, 2, 1)
