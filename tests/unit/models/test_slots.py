"""Slots: routes of tokens, rows counted by expert while experts move, and experts read into slots."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ep_server.backends.assembly import LoadParams, RankModel, load_experts, load_model
from ep_server.backends.cpu.native_compute import NativeCompute
from ep_server.backends.torch_compute import TorchCompute
from ep_server.errors import CheckpointError
from ep_server.models import experts
from ep_server.models.checkpoint import Checkpoint
from ep_server.models.compute import Compute
from ep_server.models.experts import SlotMove, in_batches, load_slots
from ep_server.models.families import read_spec
from ep_server.models.layers import MoeWeights, tensors_of
from ep_server.models.loading import PlainFiles, TensorReader
from ep_server.models.slots import ExpertRows, SlotTable
from ep_server.records import EMPTY, WAYS
from tests.support.models.checkpoints import EXPERTS, Tiny

if TYPE_CHECKING:
    from tests.support.models.fp8 import Fp8Tiny

SLOTS = 4
Get = Callable[[str], Tiny]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_token_takes_its_way(replicas: int) -> None:
    layers, experts, tokens = 2, 5, 2 * WAYS
    routes = [
        [[layer + e + experts * (way % replicas) for way in range(WAYS)] for e in range(experts)]
        for layer in range(layers)
    ]
    table = SlotTable(layers, experts)
    before = table.slots.data_ptr()
    for _ in range(2):
        table.set(routes)
    assert table.slots.data_ptr() == before
    ids = torch.randint(0, experts, (tokens, 3), generator=torch.Generator().manual_seed(0))
    for layer in range(layers):
        found = table.of(layer, ids).tolist()
        assert found == [[routes[layer][e][t % WAYS] for e in row] for t, row in enumerate(ids.tolist())]
        assert table.of(layer, ids[:0]).shape == (0, 3)


def test_ways_are_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for every layer of every step."""
    table, made = SlotTable(2, 3), list[int]()
    table.set([[[e + 3 * (way % 2) for way in range(WAYS)] for e in range(3)]] * 2)
    arange = torch.arange
    monkeypatch.setattr(
        torch, "arange", lambda count, **options: made.append(count) or arange(count, **options)
    )
    for tokens in (4, 2, 4, 5, 5):
        for layer in range(2):
            table.of(layer, torch.zeros(tokens, 1, dtype=torch.int64))
    assert made == [4, 5]


def test_rows_are_counted_by_expert_while_experts_move() -> None:
    draw = random.Random(1)
    layers, experts, slots = 3, 6, 4

    def drawn() -> list[list[int]]:
        return [draw.sample([*range(experts), *([EMPTY] * slots)], slots) for _ in range(layers)]

    held, counts = drawn(), np.zeros((layers, slots), dtype=np.int64)
    expected, rows = np.zeros((layers, experts), dtype=np.int64), ExpertRows(experts, held)
    for _ in range(20):
        for layer, slot in np.ndindex(layers, slots):
            if held[layer][slot] != EMPTY:
                came = draw.randrange(5)
                counts[layer, slot] += came
                expected[layer, held[layer][slot]] += came
        assert np.array_equal(rows.of(counts), expected)
        totals = expected.sum(0)
        shown = {e for layer in held for e in layer} - {EMPTY} | set(np.nonzero(totals)[0])
        assert rows.by_expert(counts) == {e: totals[e] for e in sorted(shown)}
        held = drawn()
        rows.moved(counts, held)


@pytest.mark.parametrize("compute", [NativeCompute(1), TorchCompute()], ids=["native", "torch"])
@pytest.mark.parametrize("made_up", [False, True], ids=["files", "dummy"])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral-tied-stacked", "deepseek_v2-lite-yarn"])
def test_experts_read_into_slots_are_those_loaded(
    tiny: Get, tmp_path: Path, name: str, made_up: bool, compute: Compute
) -> None:
    """Oracle: a model that has all experts from the start. Slots hold other values before."""
    path = tiny(name).path
    if made_up:
        shutil.copy(path / "config.json", tmp_path)
        path = tmp_path
    how = {"load_format": "dummy" if made_up else "auto", "seed": 3, "compute": compute, "threads": 2}
    whole = load_model(LoadParams(str(path), 0, (0,) * EXPERTS, "float32", **how))
    layers = whole.spec.num_layers
    held = [[EMPTY, layer % EXPERTS, EMPTY, 5] for layer in range(layers)]
    params = LoadParams(str(path), 0, (), "float32", held=held, **how)
    model = load_model(params)
    assert outputs(model, 1) == [outputs(whole, layer % EXPERTS)[layer] for layer in range(layers)]
    moves = [
        SlotMove(layer, slot, (layer + slot + 1) % EXPERTS) for layer in range(layers) for slot in (2, 3)
    ]
    addresses = [t.data_ptr() for t in slots_of(model)]
    load_experts(model, params, moves)
    assert [t.data_ptr() for t in slots_of(model)] == addresses
    assert outputs(model, 1) == [outputs(whole, layer % EXPERTS)[layer] for layer in range(layers)]
    for slot in (2, 3):
        expected = [outputs(whole, (layer + slot + 1) % EXPERTS)[layer] for layer in range(layers)]
        assert outputs(model, slot) == expected


@pytest.mark.parametrize("threads", [1, 3, 16])
@pytest.mark.parametrize("most", [1, 2, 5, 100])
@pytest.mark.parametrize("count", [0, 1, 4, 97])
def test_batches_of_slots_grow_up_to_the_most(count: int, most: int, threads: int) -> None:
    """So a slow disk shows that it is alive before each thread has read a whole batch."""
    moves = [SlotMove(0, number, number) for number in range(count)]
    batches = list(in_batches(moves, most, threads))
    assert [move for batch in batches for move in batch] == moves
    sizes = [len(batch) for batch in batches]
    assert all(1 <= size <= most for size in sizes)
    assert sizes[:-1] == sorted(sizes[:-1])
    assert all(size == most for size in sizes[threads:-1])
    if threads > 1 and count > most > threads:
        assert sizes[0] < most


@pytest.mark.parametrize("name", ["qwen3_moe-fp8", "deepseek_v3-fp8"])
def test_fp8_experts_are_read_into_slots_as_codes(fp8: Callable[[str], Fp8Tiny], name: str) -> None:
    """Oracle: a model that has all experts from the start. Scales are replaced too."""
    path, compute = str(fp8(name).path), TorchCompute()
    owners = (0,) * read_spec(path).router.num_experts
    params = LoadParams(path, 0, owners, "bfloat16", compute=compute)
    whole = load_model(params)
    sparse = [n for n, layer in enumerate(whole.weights.layers) if isinstance(layer.ffn, MoeWeights)]
    params = replace(params, placement=(), held=[[0, EMPTY, 3]] * whole.spec.num_layers)
    model = load_model(params)
    load_experts(model, params, [SlotMove(layer, slot, 2 + slot) for layer in sparse for slot in (0, 1)])
    for layer in sparse:
        held, expected = (list(tensors_of(m.weights.layers[layer].ffn.experts)) for m in (model, whole))
        assert [t.dtype for t in held] == [torch.float8_e4m3fn] * 2 + [torch.float32] * 2
        for one, two in zip(held, expected, strict=True):
            assert torch.equal(one.view(torch.uint8), two[[2, 3, 3]].view(torch.uint8)), layer


def slots_of(model: RankModel) -> Sequence[torch.Tensor]:
    return [layer.ffn.experts.down for layer in model.weights.layers if isinstance(layer.ffn, MoeWeights)]


def outputs(model: RankModel, index: int) -> list[list[float]]:
    """By layer: what FFN `index` makes of a row; [] for a dense layer."""
    row = torch.randn(1, model.spec.hidden, generator=torch.Generator().manual_seed(5))
    found = []
    for layer in model.weights.layers:
        if not isinstance(layer.ffn, MoeWeights):
            found.append([])
            continue
        offsets = torch.zeros(len(layer.ffn.experts.down) + 1, dtype=torch.int64)
        offsets[index + 1 :] = 1
        found.append(layer.ffn.experts(row, offsets)[0].tolist())
    return found


class Source(TensorReader):
    """Experts of a checkpoint. before: called before a tensor is read; gets its name."""

    def __init__(self, path: str, files: PlainFiles, before: Callable[[str], None]) -> None:
        super().__init__(Checkpoint.open(path), None, files)
        self._before, self.flushed = before, 0

    def copy(self, into: torch.Tensor, name: str, shape: tuple[int, ...], part: int | None = None) -> None:
        self._before(name)
        super().copy(into, name, shape, part)

    def flush(self) -> None:
        self.flushed += 1
        super().flush()


def reading(tiny: Get, before: Callable[[str], None], alive: Callable[[], None], **how: Any) -> int:
    """Reads two experts into slots of each layer. Returns: in how many batches."""
    path = str(tiny("qwen3_moe").path)
    held = [[EMPTY, EMPTY]] * read_spec(path).num_layers
    model = load_model(LoadParams(path, 0, (), "float32", held=held, compute=NativeCompute(1)))
    moves = [SlotMove(layer, slot, slot) for layer in range(len(held)) for slot in range(2)]
    with PlainFiles(torch.device("cpu")) as files:
        source = Source(path, files, before)
        compute = model.compute
        load_slots(source, model.spec, torch.float32, compute, model.weights, moves, alive=alive, **how)
    return source.flushed


def test_a_slow_disk_is_no_hang(tiny: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch may take longer than others wait for a sign of life."""
    signs = threading.Semaphore(0)
    monkeypatch.setattr(experts, "LOOK_SECONDS", 0.01)

    def before(name: str) -> None:
        assert not name.endswith("layers.0.mlp.experts.0.gate_proj.weight") or all(
            signs.acquire(timeout=30) for _ in range(3)
        )

    assert reading(tiny, before, signs.release, batch_bytes=1 << 30) == 1


def test_an_error_ends_what_other_threads_would_read(tiny: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, cancelled = set[str](), threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            cancelled.set()
            super().shutdown(wait=wait)

    def before(name: str) -> None:
        begun.add(name.partition("_proj")[0].rpartition(".")[0])
        if name.startswith("model.layers.0.mlp.experts.0."):
            raise CheckpointError("the disk has failed")
        cancelled.wait(30)

    monkeypatch.setattr(experts, "ThreadPoolExecutor", Pool)
    with pytest.raises(CheckpointError, match="the disk has failed"):
        reading(tiny, before, lambda: None, threads=1)
    assert len(begun) <= 2, begun  # the second may have begun before anybody saw the error


def test_cpu_ranks_read_one_expert_at_a_time(tiny: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flushed = str(tiny("qwen3_moe").path), list[int]()
    held = [[EMPTY] * SLOTS] * read_spec(path).num_layers
    params = LoadParams(path, 0, (), "float32", held=held, compute=NativeCompute(1), threads=2)
    model = load_model(params)
    monkeypatch.setattr(PlainFiles, "flush", lambda _: flushed.append(1))
    moves = [SlotMove(layer, slot, slot) for layer in range(len(held)) for slot in range(SLOTS)]
    load_experts(model, params, moves)
    assert len(flushed) == len(moves)
