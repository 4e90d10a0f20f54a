"""Logits of one sequence that runs through whole steps of a GPU. Needs no transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_server.backends.assembly import LoadParams, RankModel, load_model
from ep_server.backends.cpu.runner import ModelRunner
from ep_server.backends.gpu.assembly import GpuPlan, gpu_runner
from ep_server.backends.gpu.moe.moe import GpuRouter
from ep_server.backends.gpu.moe.rows import RowsOfSteps
from ep_server.backends.gpu.runner import GpuRunner
from ep_server.backends.gpu.step_input import StepTensors
from ep_server.backends.torch_compute import TorchCompute
from ep_server.exchange.api import Payload
from ep_server.models.families import read_spec
from ep_server.models.moe import route
from ep_server.ranks.devices import rows_of
from ep_server.records import SeqSlice, StepBatch
from ep_server.testing.reference_exchange import ReferenceExchange
from tests.support.models.bfloat16 import Rounding, forced_routing
from tests.support.models.driver import BLOCK as KV_BLOCK
from tests.support.models.driver import BLOCKS, exchange_spec
from tests.support.ranks.rank_group import greedy
from tests.support.triton.harness import DEVICE

Pieces = Sequence[tuple[int, int]]
WIDE_BLOCK = 16  # positions; the attention kernel for Hopper takes no smaller ones


def load(path: Path, dtype: str, kv_dtype: str = "auto") -> RankModel:
    placement = (0,) * read_spec(path).router.num_experts
    compute = TorchCompute(DEVICE)
    return load_model(LoadParams(str(path), 0, placement, dtype, compute=compute, kv_dtype=kv_dtype))


def exchange(model: RankModel, payload: Payload | None) -> ReferenceExchange:
    spec = exchange_spec(model, 0, 1, (0,) * model.spec.router.num_experts)
    return ReferenceExchange(spec if payload is None else replace(spec, payload=payload))


def step_runner(
    model: RankModel, payload: Payload | None = None, rows: RowsOfSteps | None = None, block: int = KV_BLOCK
) -> GpuRunner:
    carried = exchange(model, payload)
    plan = GpuPlan(BLOCKS, block, max_running=4, max_step_tokens=64, useful_blocks=BLOCKS, graphs=False)
    return gpu_runner(model, carried, rows or rows_of(carried), plan, BLOCKS)


@dataclass
class Recording:
    """A sampler's; keeps the logits that it is given."""

    sampler: Any
    logits: list[torch.Tensor]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def sample(self, draws: Any, logits: torch.Tensor, *more: Any) -> Any:
        self.logits.append(logits.detach().clone().cpu())
        return self.sampler.sample(draws, logits, *more)


def run(
    runner: GpuRunner | ModelRunner,
    ids: Sequence[int],
    pieces: Pieces,
    micro_batches: int = 1,
    block: int = KV_BLOCK,
) -> None:
    """One sequence, of which each piece [start, end) is a step; blocks in an order of no kind."""
    blocks = [(i * 37 + 11) % BLOCKS for i in range(-(-len(ids) // block))]
    runner.add(greedy(1, ids[:1], 1))
    with torch.inference_mode():
        for start, end in pieces:
            piece = SeqSlice(1, start, ids[start:end], blocks, True)
            runner.run(StepBatch((piece,), end - start), micro_batches)


def logits_of(
    runner: GpuRunner,
    ids: Sequence[int],
    pieces: Pieces,
    micro_batches: int = 1,
    block: int = KV_BLOCK,
) -> torch.Tensor:
    """After each piece: [pieces, V], on the host."""
    recording = Recording(runner._sampler, [])
    runner._sampler = recording  # type: ignore[assignment]
    run(runner, ids, pieces, micro_batches, block)
    return torch.cat(recording.logits)


@contextmanager
def routed_as(rule: Rounding, pieces: Pieces) -> Iterator[None]:
    """Choices of steps of one micro-batch are the oracle's, with the weights that the CPU engine gives."""
    with pytest.MonkeyPatch.context() as patch, forced_routing(rule.routing_of(pieces)):
        patch.setattr(GpuRouter, "choose", _choose_as_on_the_cpu)
        yield


def _choose_as_on_the_cpu(
    router: GpuRouter, x: torch.Tensor, _: StepTensors
) -> tuple[torch.Tensor, torch.Tensor]:
    weights = SimpleNamespace(router=TorchCompute().linear(router.weight.float()), bias=router.bias)
    return route(x, weights, router.spec)  # type: ignore[arg-type]


def assert_keeps_the_rule(path: Path, rule: Rounding, pieces: Pieces) -> None:
    """Of the whole step in bfloat16, see harness/bfloat16.py."""
    with routed_as(rule, pieces):
        runner = step_runner(load(path, "bfloat16"), block=WIDE_BLOCK)
        ours = logits_of(runner, rule.ids, pieces, block=WIDE_BLOCK)
    expected = rule.expected[[end - 1 for _, end in pieces]]
    assert 0 < float((ours - expected).abs().max()) <= rule.bound
