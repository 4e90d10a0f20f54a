"""New weights of a GPU's runner, copied in place under its graphs. Oracle: a runner made with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ep_server.backends.assembly import LoadParams, RankModel, load_model
from ep_server.backends.gpu.assembly import GpuPlan, gpu_runner
from ep_server.backends.gpu.runner import GpuRunner
from ep_server.backends.torch_compute import TorchCompute
from ep_server.models.families import read_spec
from ep_server.models.layers import tensors_of
from ep_server.ranks.devices import rows_of
from ep_server.ranks.new_weights import WeightsInPlace
from ep_server.records import SeqSlice, StepBatch
from ep_server.scheduler import RankScheduler, SchedulerLimits
from ep_server.testing.reference_exchange import ReferenceExchange
from tests.support.gpu.whole_steps import WIDE_BLOCK, Recording
from tests.support.models.driver import BLOCKS, exchange_spec
from tests.support.ranks.rank_group import greedy
from tests.support.triton.harness import DEVICE

PREFILL = 8  # positions; those behind them run in captured steps
LIMITS = SchedulerLimits(4, 64, WIDE_BLOCK, BLOCKS, True, 160)


class OneGpu:
    """A model alone, with captured steps."""

    def __init__(self, path: Path, dtype: str, kv_dtype: str = "auto") -> None:
        everything = (0,) * read_spec(path).router.num_experts
        self.params = LoadParams(
            str(path), 0, everything, dtype, compute=TorchCompute(DEVICE), threads=2, kv_dtype=kv_dtype
        )
        self.model: RankModel = load_model(self.params)
        exchange = ReferenceExchange(exchange_spec(self.model, 0, 1, everything))
        plan = GpuPlan(BLOCKS, WIDE_BLOCK, max_running=1, max_step_tokens=PREFILL, useful_blocks=BLOCKS)
        self.runner: GpuRunner = gpu_runner(self.model, exchange, rows_of(exchange), plan, BLOCKS)
        with torch.inference_mode():
            self.runner.graphs.capture()

    def tensors(self) -> list[torch.Tensor]:
        """All that holds weights, what was made of them too."""
        blocks = [block for block in self.runner._decoder._moe if block is not None]
        return [*tensors_of(self.model.weights), *(block.router.weight for block in blocks)]

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[steps, V] of one sequence: a prompt, then captured steps of one token."""
        recording = Recording(self.runner._sampler, [])
        self.runner._sampler = recording  # type: ignore[assignment]
        blocks = tuple(range(-(-len(ids) // WIDE_BLOCK)))
        pieces = [(0, PREFILL), *((at, at + 1) for at in range(PREFILL, len(ids)))]
        self.runner.add(greedy(1, ids[:1], 1))
        with torch.inference_mode():
            for start, end in pieces:
                batch = StepBatch((SeqSlice(1, start, tuple(ids[start:end]), blocks, True),), end - start)
                bucket = self.runner.bucket_of(batch)
                assert bucket or end - start > 1, "single tokens run in captured steps"
                self.runner.collect(self.runner.launch(batch, 1, bucket))
        self.runner.remove(1)
        self.runner._sampler = recording.sampler
        return torch.cat(recording.logits)


def assert_updates_in_place(path: Path, other: Path, ids: Sequence[int], dtype: str) -> None:
    """Addresses stay, every tensor is that of the other checkpoint, and so are logits of captured steps."""
    rank, fresh = OneGpu(path, dtype), OneGpu(other, dtype)
    scheduler = RankScheduler(LIMITS)
    old, expected = rank.logits(ids), fresh.logits(ids)
    apart = float((old - expected).abs().max())
    addresses = [tensor.data_ptr() for tensor in rank.tensors()]
    change = WeightsInPlace(rank.model, rank.params, scheduler, rank.runner).change(str(other), 7)
    prepared = change.prepare()
    assert prepared.nbytes > 0 and prepared.rate > 0
    assert torch.equal(rank.logits(ids), old), "nothing has changed yet"
    with torch.inference_mode():
        change.apply()
    assert scheduler.weights == 7
    assert [tensor.data_ptr() for tensor in rank.tensors()] == addresses
    for number, (held, wanted) in enumerate(zip(rank.tensors(), fresh.tensors(), strict=True)):
        same = torch.equal(held.view(torch.uint8), wanted.view(torch.uint8))
        assert same, f"tensor {number}: {held.dtype} {list(held.shape)}"
    assert float((rank.logits(ids) - expected).abs().max()) < apart / 100
