"""What a rank copies into the host shadow beside its steps, while experts move and weights change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_server.backends.assembly import LoadParams, RankModel, load_model
from ep_server.backends.shadow import HostExperts
from ep_server.backends.torch_compute import TorchCompute
from ep_server.errors import CheckpointError
from ep_server.models.experts import slot_parts
from ep_server.models.layers import MoeWeights
from ep_server.ranks.experts import RankExperts
from ep_server.ranks.new_weights import WeightsInPlace
from ep_server.ranks.shadow_filler import AT_ONCE, ShadowFiller
from ep_server.records import EMPTY
from ep_server.scheduler.placement import first_placement
from ep_server.scheduler.regroup import next_placement
from tests.support.models.checkpoints import CASES, EXPERTS, Tiny
from tests.support.models.fixtures import checkpoint
from tests.support.models.shadow_loads import shadow_of


class Rank:
    """Rank 0 of two, each of which can hold all experts."""

    def __init__(self, tiny: Tiny, shadow: HostExperts) -> None:
        base = LoadParams(str(tiny.path), 0, (0,) * EXPERTS, "float32", compute=TorchCompute(), threads=2)
        self.whole = load_model(base)
        layers = self.whole.spec.num_layers
        first = first_placement(layers, EXPERTS, EXPERTS, (0, 1), 2)
        copied = next_placement(first, (0, 1), copies=True)
        assert copied is not None
        self.placement = copied
        params = replace(base, held=self.placement.of_rank(0))
        self.model = load_model(params)
        runner: Any = SimpleNamespace(place=lambda routes, held: None)
        self.experts = RankExperts(params, runner, lambda params, moves, **_: 0)
        self.experts.use(self.placement, (0, 1))
        self.shadow = shadow
        self.filler = ShadowFiller(shadow, self.model, params, self.experts)

    def in_place(self) -> WeightsInPlace:
        scheduler: Any = SimpleNamespace()
        return WeightsInPlace(
            self.model, self.experts.params, scheduler, scheduler, self.experts, self.shadow, self.filler
        )

    def held(self, version: int = 0) -> set[tuple[int, int]]:
        """(layer, expert) of the entries that are there; all have the right bytes."""
        found = set()
        for layer in range(self.whole.spec.num_layers):
            for expert in range(EXPERTS):
                if self.shadow.holds(version, layer, expert):
                    found.add((layer, expert))
                    number = self.shadow.layout.number(layer, expert)
                    assert torch.equal(self.shadow._entry(number), entry(self.whole, layer, expert))
        return found

    def served(self) -> set[tuple[int, int]]:
        sparse = self.model.spec.sparse_layers
        return {(one.layer, one.expert) for one in self.experts.served_slots() if sparse[one.layer]}


def entry(model: RankModel, layer: int, expert: int) -> torch.Tensor:
    ffn = model.weights.layers[layer].ffn
    assert isinstance(ffn, MoeWeights)
    return torch.cat(slot_parts(ffn.experts, expert))


@contextmanager
def ranked(tiny: Tiny) -> Iterator[Rank]:
    with shadow_of(tiny.path, TorchCompute(), "float32") as shadow:
        rank = Rank(tiny, shadow)
        try:
            yield rank
        finally:
            rank.filler.close()
            ended()


def ended() -> None:
    """No filler runs any more."""
    until(lambda: not any(thread.name.startswith("shadow") for thread in threading.enumerate()))


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def settled(rank: Rank) -> None:
    """The shadow gets all that the rank serves, and nothing else."""
    until(lambda: rank.held() == rank.served())


def test_each_rank_copies_what_it_serves_first(tiny: Tiny) -> None:
    with ranked(tiny) as rank:
        rank.filler.start(copies=True)
        settled(rank)
        assert rank.held() != set()


def test_a_rank_that_joins_copies_once_it_takes_part(tiny: Tiny) -> None:
    with ranked(tiny) as rank:
        copying = threading.Event()
        rank.filler._copy_beside = copying.set  # type: ignore[method-assign]
        rank.filler.start(copies=False)
        assert not copying.wait(0.2)
        del rank.filler._copy_beside
        rank.experts.use(rank.placement, (0, 1))
        settled(rank)


def test_what_a_rank_serves_later_is_copied_then(tiny: Tiny) -> None:
    """Rank 1 was lost before it copied what it served."""
    with ranked(tiny) as rank:
        alone = next_placement(rank.placement, (0,))
        assert alone is not None
        rank.filler.start(copies=True)
        settled(rank)
        before = rank.held()
        rank.experts.use(alone, (0,))
        settled(rank)
        assert before < rank.held()


def test_the_next_placement_is_copied_after_an_error(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    with ranked(tiny) as rank:
        save, failed = rank.shadow.save, threading.Event()

        def fail(*_: object) -> int:
            rank.shadow.save = save  # type: ignore[method-assign]
            failed.set()
            raise ValueError("broken")

        rank.shadow.save = fail  # type: ignore[method-assign, assignment]
        rank.filler.start(copies=True)
        assert failed.wait(60)
        until(lambda: "ValueError: broken" in caplog.text)
        rank.experts.use(rank.placement, (0, 1))
        settled(rank)


def test_a_load_of_a_recovery_goes_first(tiny: Tiny) -> None:
    """Slots are not taken before a load that waits for them, even where the lock is free."""
    with ranked(tiny) as rank:
        events = list[str]()
        rank.experts._load = lambda params, moves, **_: events.append("load") or 0  # type: ignore[func-returns-value]
        rank.experts._held = [[EMPTY] * len(layer) for layer in rank.experts._held]
        rank.experts._hurry.set()  # as load() does before it waits

        def keep() -> None:
            with rank.experts.kept([]):
                events.append("kept")

        keeper = threading.Thread(target=keep)
        keeper.start()
        keeper.join(0.2)
        assert events == []
        rank.experts.load(rank.placement, idle=True)
        keeper.join(60)
        assert events == ["load", "kept"]


def test_a_refused_update_leaves_the_filler_running(tiny: Tiny, tmp_path: Path) -> None:
    with ranked(tiny) as rank:
        alone = next_placement(rank.placement, (0,))
        assert alone is not None
        rank.filler.start(copies=True)
        place = rank.in_place()
        with pytest.raises(CheckpointError):
            place.change(str(tmp_path / "mistyped"), 1).prepare()
        rank.experts.use(alone, (0,))
        settled(rank)
        place.change(str(tiny.path), 1).prepare()
        ended()
        assert rank.held() == set(), "all entries are of the new weights"


def test_new_weights_of_a_model_with_dense_layers() -> None:
    """A placement has experts in every layer, a checkpoint only in those that route."""
    dense = checkpoint(next(case for case in CASES if case.name == "deepseek_v3"))
    with ranked(dense) as rank:
        assert not all(rank.model.spec.sparse_layers)
        rank.in_place().change(str(dense.path), 1).prepare()
        assert rank.held(1) == rank.served()


def test_nothing_is_copied_over_newer_weights(tiny: Tiny) -> None:
    """Another rank writes them already, and this one has not been asked for its part."""
    with ranked(tiny) as rank:
        layer, expert = min(rank.served())
        rank.shadow._tags[rank.shadow.layout.number(layer, expert)] = 2
        rank.filler._copy_beside()
        assert rank.held() == set()


def test_slots_that_change_are_not_copied(tiny: Tiny) -> None:
    """What is no longer in its slot is left to others; what a rank serves later, it copies then."""
    with ranked(tiny) as rank:
        save, alone = rank.shadow.save, next_placement(rank.placement, (0,))
        assert alone is not None
        calls = list[int]()

        def late(weights: Any, slots: Any, *rest: Any) -> int:
            """After the first experts, this rank is alone."""
            calls.append(len(slots))
            if len(calls) == 1:
                threading.Thread(target=rank.experts.use, args=(alone, (0,))).start()
            return save(weights, slots, *rest)

        rank.shadow.save = late  # type: ignore[method-assign, assignment]
        before = rank.served()
        rank.filler.start(copies=True)
        until(lambda: rank.experts.placement is alone)
        settled(rank)
        assert before < rank.held()
        assert max(calls) <= AT_ONCE


def test_nothing_is_copied_behind_stop(tiny: Tiny) -> None:
    with ranked(tiny) as rank:
        rank.filler.stop()
        rank.filler.start(copies=True)
        ended()
        assert rank.held() == set()
