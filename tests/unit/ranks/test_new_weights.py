"""New weights of one rank, copied over the old ones: every family, against models that were loaded so.

A stream across the switch has its oracle in freshly loaded weights over the KV cache of the old ones.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ep_server.backends.assembly import LoadParams, RankModel, load_model
from ep_server.backends.cpu.runner import ModelRunner
from ep_server.errors import CheckpointError
from ep_server.exchange.api import Exchange
from ep_server.models.decoder import DecoderParams
from ep_server.models.families import read_spec
from ep_server.models.kv_cache import KvCache
from ep_server.models.layers import tensors_of
from ep_server.models.sizes import Dtype
from ep_server.ranks.new_weights import WeightsInPlace
from ep_server.records import SampledToken, StepBatch
from ep_server.scheduler import RankScheduler, SchedulerLimits
from ep_server.testing.reference_exchange import ReferenceExchange
from tests.support.models.checkpoints import CASES, Tiny
from tests.support.models.driver import BLOCK, BLOCKS, GreedySampler, exchange_spec, generate
from tests.support.models.fixtures import one_thread, tiny
from tests.support.models.perturbed import perturbed

__all__ = ["one_thread", "tiny"]

NEW, SWITCH_AT = 24, 12
LIMITS = SchedulerLimits(4, 64, BLOCK, BLOCKS, True, 160)


class OneRank:
    """A model alone, on a KV cache that other models may share."""

    def __init__(self, path: Path, dtype: str, cache: KvCache | None = None) -> None:
        everything = (0,) * read_spec(path).router.num_experts
        self.params = LoadParams(str(path), 0, everything, dtype)
        self.model: RankModel = load_model(self.params)
        exchange: Exchange = ReferenceExchange(exchange_spec(self.model, 0, 1, everything))
        torch_dtype = torch.float32 if self.model.dtype is Dtype.FLOAT32 else torch.bfloat16
        self.cache = cache or KvCache(self.model.spec, BLOCKS, BLOCK, torch_dtype, torch.device("cpu"))
        model = self.model
        decoder = DecoderParams(
            model.spec, model.weights, exchange, self.cache, model.max_context, model.compute
        )
        self.runner = ModelRunner(decoder, GreedySampler())  # type: ignore[arg-type]


class Switching:
    """A runner that calls `switch` before a step, and runs from there on what it returns."""

    def __init__(self, runner: ModelRunner, switch: Callable[[], ModelRunner]) -> None:
        self.steps, self._runner, self._switch = 0, runner, switch

    def run(self, batch: StepBatch, micro_batches: int = 1) -> list[SampledToken]:
        if self.steps == SWITCH_AT:
            self._runner = self._switch()
        self.steps += 1
        return self._runner.run(batch, micro_batches)


def outputs(runner: Any, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    return generate(runner, prompts, NEW)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case.name, "float32") for case in CASES),
        ("qwen3_moe-dense-layer-bias-shards", "bfloat16"),
        ("deepseek_v3", "bfloat16"),
    ],
)
def test_weights_change_in_place(case: str, dtype: str, tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    made = tiny(case)
    other = perturbed(made.path, tmp_path / "other")
    rank, scheduler = OneRank(made.path, dtype), RankScheduler(LIMITS)
    old, new = outputs(rank.runner, made.prompts), outputs(OneRank(other, dtype).runner, made.prompts)
    assert all(a != b for a, b in zip(old, new, strict=True))
    addresses = [tensor.data_ptr() for tensor in tensors_of(rank.model.weights)]
    place = WeightsInPlace(rank.model, rank.params, scheduler, rank.runner)
    change = place.change(str(other), 3)
    prepared = change.prepare()
    assert prepared.nbytes >= rank.model.weights.nbytes and prepared.rate > 0
    assert outputs(rank.runner, made.prompts) == old  # nothing has changed yet

    def switch() -> ModelRunner:
        change.apply()
        return rank.runner

    across = outputs(Switching(rank.runner, switch), made.prompts)
    assert scheduler.weights == 3
    assert [tensor.data_ptr() for tensor in tensors_of(rank.model.weights)] == addresses
    assert outputs(rank.runner, made.prompts) == new

    before = OneRank(made.path, dtype)
    oracle = Switching(before.runner, lambda: OneRank(other, dtype, before.cache).runner)
    assert across == outputs(oracle, made.prompts)
    assert across not in (old, new)


def _other_config(path: Path) -> None:
    file = path / "config.json"
    file.write_text(file.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))


def _other_shape(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("edit", "named"), [(_other_config, "norm_eps = 1e-05"), (_other_shape, r"model.norm.weight.*\[63\]")]
)
def test_a_checkpoint_that_differs_is_refused(
    edit: Callable[[Path], None], named: str, tiny: Callable[[str], Tiny], tmp_path: Path
) -> None:
    made = tiny("qwen3_moe")
    shutil.copytree(made.path, tmp_path / "other")
    edit(tmp_path / "other")
    rank = OneRank(made.path, "float32")
    held = [tensor.clone() for tensor in tensors_of(rank.model.weights)]
    place = WeightsInPlace(rank.model, dataclasses.replace(rank.params), RankScheduler(LIMITS), rank.runner)
    with pytest.raises(CheckpointError, match=named):
        place.change(str(tmp_path / "other"), 1).prepare()
    assert all(torch.equal(a, b) for a, b in zip(held, tensors_of(rank.model.weights), strict=True))
