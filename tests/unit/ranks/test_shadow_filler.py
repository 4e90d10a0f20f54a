"""What a rank copies into the host shadow beside its steps, while experts move and weights change."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from ep_server.backends.assembly import LoadParams, RankModel, load_model
from ep_server.backends.shadow import HostExperts
from ep_server.backends.torch_compute import TorchCompute
from ep_server.models.experts import slot_parts
from ep_server.models.layers import MoeWeights
from ep_server.ranks.experts import RankExperts
from ep_server.ranks.shadow_filler import AT_ONCE, ShadowFiller
from ep_server.scheduler.placement import first_placement
from ep_server.scheduler.regroup import next_placement
from tests.support.models.checkpoints import EXPERTS, Tiny
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
        self.experts = RankExperts(params, runner, lambda params, moves, *, beside: 0)
        self.experts.use(self.placement, (0, 1))
        self.shadow = shadow
        self.filler = ShadowFiller(shadow, self.model, params, self.experts)

    def held(self) -> set[tuple[int, int]]:
        """(layer, expert) of the entries that are there; all have the right bytes."""
        found = set()
        for layer in range(self.whole.spec.num_layers):
            for expert in range(EXPERTS):
                if self.shadow.holds(0, layer, expert):
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
        yield Rank(tiny, shadow)


def ended() -> None:
    """No filler runs any more."""
    deadline = time.monotonic() + 60
    while any(thread.name.startswith("shadow") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_each_rank_copies_what_it_serves_first(tiny: Tiny) -> None:
    with ranked(tiny) as rank:
        rank.filler.start(copies=True)
        ended()
        assert rank.held() == rank.served() != set()


def test_a_rank_that_joins_copies_nothing(tiny: Tiny) -> None:
    with ranked(tiny) as rank:
        rank.filler.start(copies=False)
        ended()
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
        ended()
        assert before < rank.held() == rank.served()
        assert max(calls) <= AT_ONCE


def test_nothing_is_copied_behind_stop(tiny: Tiny) -> None:
    with ranked(tiny) as rank:
        rank.filler.stop()
        rank.filler.start(copies=True)
        ended()
        assert rank.held() == set()
