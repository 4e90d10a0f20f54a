"""Ranks that write experts into a host shadow and load them from it. Oracle: models loaded from files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from ep_server.backends.assembly import LoadParams, RankModel, load_experts, load_model
from ep_server.backends.cpu.native_compute import NativeCompute
from ep_server.backends.shadow import HostExperts, copies_for
from ep_server.models.compute import Compute
from ep_server.models.experts import SlotMove, slot_parts
from ep_server.models.families import read_spec
from ep_server.models.layers import MoeWeights
from ep_server.models.shadow import ShadowLayout, create_shadow
from ep_server.models.sizes import Dtype
from ep_server.records import EMPTY
from tests.support.models.poisoned import poison_experts


@contextmanager
def shadow_of(path: Path, compute: Compute, dtype: str) -> Iterator[HostExperts]:
    layout = ShadowLayout.of(read_spec(path), Dtype(dtype), packed=isinstance(compute, NativeCompute))
    fd = create_shadow(layout)
    try:
        yield HostExperts(layout, copies_for(compute.device), fd)
    finally:
        os.close(fd)


def slots(model: RankModel, layer: int) -> list[torch.Tensor]:
    """By slot: its bytes."""
    ffn = model.weights.layers[layer].ffn
    if not isinstance(ffn, MoeWeights):
        return []
    return [torch.cat(slot_parts(ffn.experts, slot)) for slot in range(len(ffn.experts.down))]  # type: ignore[attr-defined]


def check_loads(path: Path, poisoned: Path, dtype: str, compute: Compute) -> None:
    """Two ranks write their experts; another one gets them from there, at its start and later."""
    how = {"dtype": dtype, "compute": compute, "threads": 2}
    count = read_spec(path).router.num_experts
    whole = load_model(LoadParams(str(path), 0, (0,) * count, **how))
    layers = range(whole.spec.num_layers)
    with shadow_of(path, compute, dtype) as shadow:
        for rank in range(2):
            half = LoadParams(str(path), rank, tuple(e % 2 for e in range(count)), **how)
            model = load_model(half, shadow=shadow)
            own = half.slots(model.spec)
            with ThreadPoolExecutor(2) as pool:
                assert shadow.save(model.weights, own, 0, pool) == len(own) > 0
                assert shadow.save(model.weights, own, 0, pool) == 0, "each entry is written once"
        poison_experts(poisoned)
        held = [[EMPTY, 3, layer % count, EMPTY] for layer in layers]
        joins = LoadParams(str(poisoned), 0, (), held=held, **how)
        model = load_model(joins, shadow=shadow)
        moves = [SlotMove(layer, 3, (layer + 1) % count) for layer in layers]
        assert load_experts(model, joins, moves, shadow) == sum(whole.spec.sparse_layers)
        for layer in layers:
            expected, found = slots(whole, layer), slots(model, layer)
            for slot, expert in ((1, 3), (2, layer % count), (3, (layer + 1) % count)):
                assert not expected or torch.equal(found[slot], expected[expert]), (layer, slot)

        # Entries of other weights, and those that nobody has written, come from the files.
        later = replace(joins, path=str(path), version=1)
        assert load_experts(model, later, moves, shadow) == 0
        for layer in layers:
            expected, found = slots(whole, layer), slots(model, layer)
            assert not expected or torch.equal(found[3], expected[(layer + 1) % count])
