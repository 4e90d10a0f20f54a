"""Experts that are read beside steps are those that are read at once, whatever they come from."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ep_server.backends import slot_loader
from ep_server.backends.assembly import LoadParams, load_model
from ep_server.backends.cpu.native_compute import NativeCompute
from ep_server.backends.slot_loader import SlotLoader
from ep_server.backends.torch_compute import TorchCompute
from ep_server.models.checkpoint import Checkpoint
from ep_server.models.compute import Compute
from ep_server.models.experts import SlotMove
from ep_server.records import EMPTY
from tests.support.models.checkpoints import EXPERTS, Tiny
from tests.support.models.shadow_loads import shadow_of, slots

Get = Callable[[str], Tiny]
HALF = EXPERTS // 2


def held(path: Path, compute: Compute, **fields: object) -> LoadParams:
    """Rank 0 holds the first half, and has two empty slots."""
    layers = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    row = [*range(HALF), EMPTY, EMPTY]
    return LoadParams(str(path), 0, (), "float32", compute=compute, held=[row] * layers, **fields)


@pytest.mark.parametrize("compute", [NativeCompute(1), TorchCompute()], ids=["native", "torch"])
@pytest.mark.parametrize("source", ["auto", "dummy", "shadow"])
def test_read_beside_is_as_read_at_once(tiny: Get, source: str, compute: Compute, tmp_path: Path) -> None:
    path = tiny("qwen3_moe").path
    how = {"load_format": "dummy"} if source == "dummy" else {}
    params = held(path, compute, **how)
    whole = load_model(replace(params, placement=(0,) * EXPERTS, held=None))
    moves = [SlotMove(layer, HALF, EXPERTS - 1 - layer % 2) for layer in range(whole.spec.num_layers)]
    with shadow_of(path, compute, "float32") as shadow:
        with ThreadPoolExecutor(1) as pool:
            everything = replace(params, placement=(0,) * EXPERTS, held=None).slots(whole.spec)
            shadow.save(whole.weights, everything, 0, pool)
        model = load_model(params)
        loader = SlotLoader(model, shadow if source == "shadow" else None)
        loader.warm_up(params)
        if source == "shadow":
            params = replace(params, path="nowhere")
        copied = loader(params, moves, beside=True)
        assert copied == (sum(whole.spec.sparse_layers) if source == "shadow" else 0)
    for layer in range(whole.spec.num_layers):
        expected, found = slots(whole, layer), slots(model, layer)
        assert not expected or torch.equal(found[HALF], expected[EXPERTS - 1 - layer % 2])
        for slot in range(HALF if expected else 0):
            assert torch.equal(found[slot], expected[slot])


def test_an_entry_of_other_weights_is_not_used(tiny: Get, tmp_path: Path) -> None:
    path, compute = tiny("qwen3_moe").path, TorchCompute()
    params = held(path, compute)
    model = load_model(params)
    moves = [SlotMove(0, HALF, EXPERTS - 1)]
    with shadow_of(path, compute, "float32") as shadow:
        loader = SlotLoader(model, shadow)
        assert loader(replace(params, version=1), moves, beside=True) == 0
    whole = load_model(replace(params, placement=(0,) * EXPERTS, held=None))
    assert torch.equal(slots(model, 0)[HALF], slots(whole, 0)[EXPERTS - 1])


def test_the_checkpoint_is_opened_once(tiny: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    params = held(tiny("qwen3_moe").path, TorchCompute())
    loader, opened = SlotLoader(load_model(params)), list[str]()
    opening = Checkpoint.open

    def counted(path: str) -> Checkpoint:
        opened.append(path)
        return opening(path)

    monkeypatch.setattr(Checkpoint, "open", counted)
    for slot in (HALF, HALF + 1):
        loader(params, [SlotMove(0, slot, EXPERTS - 1)], beside=True)
    assert opened == [params.path]
    loader(replace(params, version=1), [SlotMove(0, HALF, EXPERTS - 1)], beside=True)
    assert len(opened) == 2, "other files may be there by then"


def test_reading_beside_steps_is_slow(tiny: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    """No faster than the rate; at once is not bounded."""
    params, rests = held(tiny("qwen3_moe").path, TorchCompute()), list[float]()
    loader = SlotLoader(load_model(params))
    monkeypatch.setattr(slot_loader, "BYTES_PER_SECOND", 1.0)
    monkeypatch.setattr(time, "sleep", rests.append)
    move = SlotMove(0, HALF, EXPERTS - 1)
    loader(params, [move], beside=False)
    assert rests == []
    loader(params, [move], beside=True)
    assert len(rests) == 1 and rests[0] > 100
