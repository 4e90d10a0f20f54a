"""Runners of a GPU's steps, driven as a rank's scheduler does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

from ep_server.backends.assembly import LoadParams, load_model
from ep_server.backends.gpu.attention.decode_kernels import DecodeKernels, triton_decode
from ep_server.backends.gpu.graphs import GraphKey
from ep_server.backends.gpu.kernels.triton.paged import AttentionRule, PagedKv, Sequences
from ep_server.backends.gpu.kernels.triton.partial import Partial
from ep_server.backends.gpu.kernels.triton.rope import HeadNorm, Rotation, store_gqa
from ep_server.backends.gpu.layer_progress import DeviceProgress
from ep_server.backends.gpu.moe.rows import PlainRows, Rows, RowsOfSteps
from ep_server.backends.gpu.runner import GpuOptions, GpuRunner, Launched
from ep_server.backends.gpu.step_input import InputShape, StepTensors
from ep_server.backends.torch_compute import TorchCompute
from ep_server.models.decoder import DecoderParams
from ep_server.models.families import read_spec
from ep_server.models.families.spec import GqaSpec
from ep_server.models.kv_cache import KvCache
from ep_server.records import StepBatch
from ep_server.scheduler import RankScheduler, SchedulerLimits
from ep_server.testing.reference_exchange import ReferenceExchange
from tests.support.models.checkpoints import Tiny
from tests.support.models.driver import BLOCK, BLOCKS, exchange_spec
from tests.support.ranks.rank_group import greedy
from tests.support.triton.harness import DEVICE

TOKENS = 64


def gpu_runner(
    path: Path,
    keys: tuple[GraphKey, ...] = (),
    check: Callable[[], None] = lambda: None,
    kernels: DecodeKernels | None = None,
    rows: Rows | None = None,
    progress: DeviceProgress | None = None,
) -> GpuRunner:
    experts = read_spec(path).router.num_experts
    model = load_model(LoadParams(str(path), 0, (0,) * experts, "float32", compute=TorchCompute(DEVICE)))
    exchange = ReferenceExchange(exchange_spec(model, 0, 1, (0,) * experts, TOKENS))
    cache = KvCache(model.spec, BLOCKS, BLOCK, torch.float32, DEVICE)
    cache.progress = progress or cache.progress
    params = DecoderParams(model.spec, model.weights, exchange, cache, model.max_context, model.compute)
    shape = InputShape(TOKENS, 16, -(-model.max_context // BLOCK), BLOCK)
    rows = rows or PlainRows(exchange)
    options = GpuOptions(shape, RowsOfSteps(rows, rows, check), keys, kernels=kernels)
    return GpuRunner(params, options)


class SingleTokens:
    """Stands for the attention kernel for Hopper, and for what a step gives it."""

    rows = 0

    def __init__(self, step: StepTensors, *_: object) -> None:
        self.count = count = len(step.singles)
        self.positions, self.slots = step.positions[:count], step.singles.slots
        self.sequences = Sequences(step.blocks[:count], step.singles.lengths)


class Together:
    """Norm, rotation, cache and attention of single tokens by Triton's kernels."""

    def __init__(self, kv: PagedKv, spec: GqaSpec, table: torch.Tensor, norm: HeadNorm | None) -> None:
        self._kv, self._spec, self._table, self._norm = kv, spec, table, norm

    def run(self, qkv: torch.Tensor | Partial, step: SingleTokens, out: torch.Tensor) -> None:
        SingleTokens.rows += len(out)
        q, spec, turns = torch.empty_like(out), self._spec, (self._table, step.positions, step.slots)
        store_gqa(qkv, q, self._kv, Rotation(*turns), self._norm)
        layer = triton_decode(spec, len(self._table), 0).over(step.sequences)
        layer(q, self._kv, AttentionRule(spec.scale), out)


COUNT = 3  # tokens drawn


def staggered(
    runner: GpuRunner, model: Tiny, prompts: int, micro_batches: int = 1
) -> tuple[dict[int, list[int]], list[int]]:
    """Tokens by request, one request more in each step; and the bucket of every step."""
    limits = SchedulerLimits(
        max_running=8, max_step_tokens=20, block_size=BLOCK, kv_blocks=BLOCKS,
        prefix_cache=True, max_context=128, ahead=1,
    )  # fmt: skip
    scheduler, tokens, buckets = RankScheduler(limits), dict[int, list[int]](), list[int]()
    flying: deque[tuple[StepBatch, Launched]] = deque()
    waiting = list(enumerate(model.prompts[:prompts]))
    with torch.inference_mode():
        runner.graphs.capture()
        while waiting or scheduler.has_work:
            if waiting:
                number, prompt = waiting.pop(0)
                request = greedy(number, prompt, COUNT)
                runner.add(request)
                scheduler.add(request)
            while len(flying) <= 1 and (batch := scheduler.plan()).slices:
                buckets.append(runner.bucket_of(batch))
                flying.append((batch, runner.launch(batch, micro_batches, buckets[-1])))
            batch, launched = flying.popleft()
            for event in scheduler.commit(batch, runner.collect(launched)):
                tokens.setdefault(event.number, []).append(event.token_id)
    return tokens, buckets
