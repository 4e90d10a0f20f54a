"""Experts move on a GPU behind the steps in flight, and beside them. Oracle: the values of files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ep_server.backends.assembly import LoadParams, RankModel, load_model
from ep_server.backends.gpu.moves import ExpertMoves
from ep_server.backends.shadow import HostExperts
from ep_server.backends.slot_loader import SlotLoader
from ep_server.backends.torch_compute import TorchCompute
from ep_server.models.experts import SlotMove
from ep_server.models.families import read_spec
from ep_server.models.slots import SlotTable
from ep_server.records import EMPTY, WAYS
from tests.support.models.answers import Answers
from tests.support.models.shadow_loads import shadow_of, slots

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
LONG = 400_000_000  # cycles: a fifth of a second or more


def test_steps_in_flight_keep_their_routes() -> None:
    """The host does not wait for them, and their rows count for the experts before."""
    table, total = SlotTable(1, 2, DEVICE), torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    moves = ExpertMoves(table, 2, total, 10.0)
    routes = np.zeros((1, 2, WAYS), dtype=np.int64)
    for place in range(2):  # warms up: the first launch of a kernel may wait for the device
        moves.place(routes + place, [[0, EMPTY]])
        moves.rows()
        table.slots.clone()
        total.add_(0)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    seen = table.slots.clone()
    total.add_(3)
    began = time.monotonic()
    moves.place(routes + 5, [[1, 0]])
    assert not torch.cuda.current_stream().query(), "the device was ahead: make it sleep longer"
    assert time.monotonic() - began < 0.1
    total.add_(10)
    later = table.slots.clone()
    rows = moves.rows()
    assert rows is not None
    torch.cuda.synchronize()
    assert (seen == 1).all() and (later == 5).all()
    assert rows.of(total.cpu().numpy()).tolist() == [[13, 10]]


@pytest.mark.parametrize("source", ["auto", "dummy", "shadow"])
def test_experts_are_read_beside_steps(answers: dict[str, Answers], source: str) -> None:
    """Without a wait of the steps' stream, and once warm, without new device memory."""
    path = answers["qwen3_moe"].path
    count = read_spec(path).router.num_experts
    layers = read_spec(path).num_layers
    half, how = count // 2, {"load_format": "dummy"} if source == "dummy" else {}
    row = [*range(half), *([EMPTY] * 2)]
    params = LoadParams(
        str(path), 0, (), "bfloat16", compute=TorchCompute("cuda"), held=[row] * layers, threads=2, **how
    )
    everything = replace(params, placement=(0,) * count, held=None)
    whole, model = load_model(everything), load_model(params)
    moves = [SlotMove(layer, half, count - 1 - layer % 2) for layer in range(layers)]
    with filled(path, whole, everything) as shadow:
        loader = SlotLoader(model, shadow if source == "shadow" else None)
        loader.warm_up(params)
        loader(params, moves[:1], beside=True)
        before = torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.memory_stats()["num_device_free"]
        copied = loader(params, moves, beside=True)
        after = torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.memory_stats()["num_device_free"]
    assert after == before
    assert copied == (sum(whole.spec.sparse_layers) if source == "shadow" else 0)
    for layer in range(layers):
        expected, found = slots(whole, layer), slots(model, layer)
        assert not expected or torch.equal(found[half], expected[count - 1 - layer % 2])


@contextmanager
def filled(path: Path, whole: RankModel, params: LoadParams) -> Iterator[HostExperts]:
    """A shadow with all experts."""
    with shadow_of(path, TorchCompute("cuda"), "bfloat16") as shadow, ThreadPoolExecutor(2) as pool:
        shadow.save(whole.weights, params.slots(whole.spec), 0, pool)
        yield shadow
