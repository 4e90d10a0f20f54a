"""Whole steps whose chunks attend to a widened copy of an FP8 cache. Triton's kernel attends to it here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ep_server.backends.gpu import graphs
from ep_server.backends.gpu.assembly import GpuPlan, gpu_runner
from ep_server.backends.gpu.attention import widened
from ep_server.backends.gpu.graphs import GraphKey
from ep_server.backends.gpu.kernels.triton.paged import AttentionRule, PagedKv, Sequences
from ep_server.backends.gpu.kernels.triton.paged_prefill import prefill
from ep_server.backends.gpu.runner import GpuRunner
from ep_server.backends.gpu.widening import Widening
from ep_server.models.families.spec import GqaSpec
from ep_server.models.kv_cache import KvLayer
from ep_server.ranks.devices import rows_of
from ep_server.records import StepBatch
from tests.support.compare import assert_close
from tests.support.gpu.whole_steps import exchange, load, logits_of
from tests.support.models.checkpoints import Tiny
from tests.support.models.driver import BLOCK, BLOCKS
from tests.support.models.kv_scales import with_scales

IDS = [(i * i * 17 + 3 * i + 5) % 256 for i in range(11)]
BUCKET, PIECES = 20, ((0, 7), (7, 10), (10, 11))
CHUNKS = sum(end - start > 1 for start, end in PIECES)


class Wide:
    """In place of a HopperPrefill: attention over the copy, times the scales."""

    runs = 0

    def __init__(self, kv: PagedKv, spec: GqaSpec, scratch: torch.Tensor) -> None:
        self._layer, self._scale = kv.layer, spec.scale
        for each in (kv.layer.k, kv.layer.v):
            assert each is not None
            each.fill_(float("nan"))

    def run(
        self,
        q: torch.Tensor,
        query_start: torch.Tensor,
        sequences: Sequences,
        out: torch.Tensor,
        scales: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        Wide.runs += 1
        k, v = self._layer.k, self._layer.v
        assert v is not None
        k, v = (each.float() * scale[:, None] for each, scale in zip((k, v), scales, strict=True))
        kv = PagedKv(KvLayer(k, v, self._layer.v_dim))
        prefill(q, query_start, kv, sequences, AttentionRule(self._scale), out)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widened, "HopperPrefill", Wide)
    Wide.runs = 0


def runner_of(path: Path) -> GpuRunner:
    model = load(path, "float32", "fp8_e4m3")  # no rounding turns a choice of experts
    carried = exchange(model, None)
    plan = GpuPlan(BLOCKS, BLOCK, 4, 64, useful_blocks=BLOCKS, graphs=False, copies=True)
    return gpu_runner(model, carried, rows_of(carried), plan, BLOCKS)


def in_buckets(runner: GpuRunner) -> GpuRunner:
    """Runs every step as a graph would."""
    runner.graphs.record_only([GraphKey(BUCKET), GraphKey(BUCKET, copied=True)])
    with torch.inference_mode():
        runner.graphs.capture()

    def run(batch: StepBatch, micro_batches: int = 1) -> object:
        return runner.collect(runner.launch(batch, micro_batches, BUCKET))

    runner.run = run  # type: ignore[method-assign, assignment]
    return runner


def test_logits_are_those_of_the_cache(
    tiny: Callable[[str], Tiny], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a graph, and in one. The copy holds NaN at first, and so do its parts that no step uses."""
    path, scales = with_scales(tiny("qwen3_moe"), tmp_path / "scaled")
    plain = logits_of(runner_of(path), IDS, PIECES)
    assert Wide.runs == 0  # none of these chunks pays
    monkeypatch.setattr(Widening, "pays", lambda *_: True)
    alone = logits_of(runner_of(path), IDS, PIECES)
    assert Wide.runs == CHUNKS * len(scales)
    assert_close(alone, plain, "logits", abs_tol=1e-3 * float(plain.abs().max()))
    runner = in_buckets(runner_of(path))
    Wide.runs = 0
    captured = logits_of(runner, IDS, PIECES)
    assert Wide.runs == CHUNKS * len(scales)
    assert_close(captured, alone, "logits", abs_tol=1e-3 * float(plain.abs().max()))


def test_a_step_whose_graph_was_not_captured_runs_without_a_copy() -> None:
    keys = [GraphKey(8), GraphKey(BUCKET), GraphKey(BUCKET, copied=True)]
    found = graphs.Graphs(lambda _: torch.zeros(1), keys, torch.device("cpu"), 1.0)
    assert found.with_copy(GraphKey(BUCKET), True) == GraphKey(BUCKET, copied=True)
    assert found.with_copy(GraphKey(BUCKET), False) == GraphKey(BUCKET)
    assert found.with_copy(GraphKey(8), True) == GraphKey(8)
    found.record_modes(lambda rows: (False, rows > 8))
    assert found.with_copy(GraphKey(BUCKET, normal=True), True) == GraphKey(BUCKET, normal=True, copied=True)


def test_start_runs_both_kernels(tiny: Callable[[str], Tiny]) -> None:
    runner = runner_of(tiny("qwen3_moe").path)
    with torch.inference_mode():
        runner.prepare()
    assert Wide.runs == len(runner.kv_cache.layers)
