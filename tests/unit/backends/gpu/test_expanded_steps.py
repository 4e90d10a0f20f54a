"""Whole steps whose chunks attend to expanded latents. Triton's kernel attends to the expansion here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ep_server.backends.assembly import LoadParams, RankModel, load_model
from ep_server.backends.gpu.assembly import GpuPlan, gpu_runner
from ep_server.backends.gpu.attention import expanded
from ep_server.backends.gpu.expansion import Expansion
from ep_server.backends.gpu.graphs import GraphKey
from ep_server.backends.gpu.kernels.triton.expand import TILE, ExpandedKv
from ep_server.backends.gpu.kernels.triton.paged import AttentionRule, PagedKv, Sequences
from ep_server.backends.gpu.kernels.triton.paged_prefill import prefill
from ep_server.backends.gpu.runner import GpuRunner
from ep_server.backends.torch_compute import TorchCompute
from ep_server.models.kv_cache import KvLayer
from ep_server.ranks.devices import rows_of
from ep_server.records import SeqSlice, StepBatch
from tests.support.compare import assert_close
from tests.support.gpu.specialised import MLA
from tests.support.gpu.whole_steps import Recording, exchange
from tests.support.models.driver import BLOCK, BLOCKS
from tests.support.ranks.rank_group import greedy
from tests.support.triton.harness import DEVICE, random

BUCKET, LAYERS, PASSES = 20, 2, 2
PROMPT = [(i * i * 17 + 3 * i + 5) % 256 for i in range(140)]  # over one tile
# (start, end) of each sequence: chunks, then one beside a single token. The cache holds what is before them.
STEPS = (((0, 9), (123, 132)), ((9, 10), (132, 140)))


class Over:
    """In place of a HopperLatentPrefill: Triton's attention over the expanded keys and values."""

    runs = 0

    def __init__(self, kv: ExpandedKv, scale: float, scratch: torch.Tensor | None) -> None:
        self._kv, self._rule = kv, AttentionRule(scale)
        for each in (kv.k, kv.v, kv.rope):
            each.fill_(float("nan"))

    def run(
        self,
        q: torch.Tensor,
        query_start: torch.Tensor,
        sequences: Sequences,
        out: torch.Tensor,
        scales: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        Over.runs += 1
        kv = self._kv
        shared = kv.rope.expand(len(kv.k), *kv.rope.shape)
        k, v = (each.transpose(0, 1) for each in (torch.cat([kv.k, shared], 2), kv.v))
        if scales is not None:
            k, v = (each * scale[:, None] for each, scale in zip((k, v), scales, strict=True))
        k, v = (each.reshape(-1, TILE, *each.shape[1:]).contiguous() for each in (k, v))
        made = torch.full(out.shape, float("nan"), dtype=out.dtype, device=out.device)
        paged = PagedKv(KvLayer(k, v, v.shape[3]))
        prefill(q.contiguous(), query_start, paged, sequences, self._rule, made)
        rows = made.isnan().logical_not()
        out[rows] = made[rows]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expanded, "HopperLatentPrefill", Over)
    monkeypatch.setattr(Expansion, "heads", property(lambda rule: rule.spec.heads // PASSES))
    Over.runs = 0


@pytest.fixture(params=["auto", "fp8_e4m3"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], RankModel]:
    """A small model of random weights in float32, so that no rounding turns a choice of experts."""
    (tmp_path / "config.json").write_text(json.dumps(MLA))
    placement = (0,) * 16  # experts
    params = LoadParams(str(tmp_path), 0, placement, "float32", compute=TorchCompute(DEVICE))
    return lambda: load_model(replace(params, load_format="dummy", kv_dtype=request.param))


def runner_of(model: RankModel) -> GpuRunner:
    carried = exchange(model, None)
    plan = GpuPlan(BLOCKS, BLOCK, 4, 24, useful_blocks=BLOCKS, graphs=False, copies=True)
    runner = gpu_runner(model, carried, rows_of(carried), plan, BLOCKS)
    for index, layer in enumerate(runner.kv_cache.layers):
        layer.k.copy_(random(*layer.k.shape, seed=index).to(layer.k.dtype))
    layers = runner._decoder._kv
    for index, kv in enumerate(layers):
        if kv.k_scale is not None:
            layers[index] = replace(kv, k_scale=kv.k_scale * 0.03 * (index + 1))
    return runner


def logits(runner: GpuRunner, bucket: int = 0) -> torch.Tensor:
    """Of all steps; in a bucket they run as a graph would."""
    recording = Recording(runner._sampler, [])
    runner._sampler = recording  # type: ignore[assignment]
    tables = [[(i * 37 + 11 + n * 50) % BLOCKS for i in range(45)] for n in (0, 1)]
    for number in (1, 2):
        runner.add(greedy(number, PROMPT[:1], 1))
    with torch.inference_mode():
        for pieces in STEPS:
            slices = tuple(
                SeqSlice(n + 1, start, PROMPT[start:end], tables[n][: -(-end // BLOCK)], True)
                for n, (start, end) in enumerate(pieces)
            )
            count = sum(end - start for start, end in pieces)
            runner.collect(runner.launch(StepBatch(slices, count), 1, bucket if count <= bucket else 0))
    return torch.cat(recording.logits)


def test_logits_are_those_of_the_absorbed_form(
    model: Callable[[], RankModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a graph, and in one, where only the device knows which rows are single tokens."""
    monkeypatch.setattr(Expansion, "pays", lambda *_: False)
    absorbed = logits(runner_of(model()))
    assert Over.runs == 0
    monkeypatch.setattr(Expansion, "pays", lambda *_: True)
    alone = logits(runner_of(model()))
    assert Over.runs == len(STEPS) * LAYERS * PASSES
    assert_close(alone, absorbed, "logits", abs_tol=1e-4 * float(absorbed.abs().max()))
    runner = runner_of(model())
    runner.graphs.record_only([GraphKey(BUCKET), GraphKey(BUCKET, copied=True)])
    with torch.inference_mode():
        runner.graphs.capture()
    Over.runs = 0
    captured = logits(runner, BUCKET)
    assert Over.runs == len(STEPS) * LAYERS * PASSES
    assert_close(captured, absorbed, "logits", abs_tol=1e-4 * float(absorbed.abs().max()))


def test_start_runs_both_forms(model: Callable[[], RankModel]) -> None:
    runner = runner_of(model())
    with torch.inference_mode():
        runner.prepare()
    assert Over.runs == LAYERS * PASSES
