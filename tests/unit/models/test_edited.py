"""Checkpoints edited by hand as users do: what transformers makes of them, in tokens and in dtypes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ep_server.backends.assembly import LoadParams, load_model
from ep_server.backends.torch_compute import TorchCompute
from ep_server.exchange.api import Payload
from ep_server.models.checkpoint import INDEX
from ep_server.models.families import read_spec
from ep_server.models.inspect import inspect_checkpoint, inspect_config
from ep_server.models.sizes import Dtype, serving_dtype
from ep_server.ranks.group import plan_group
from tests.support.models.checkpoints import EXPERTS, HIDDEN, NEW_TOKENS, VOCAB, Tiny, greedy
from tests.support.models.driver import alone, generate
from tests.support.ranks.rank_group import rank_config

Get = Callable[[str], Tiny]
Config, Tensors = dict[str, Any], dict[str, torch.Tensor]
PROMPT = tuple((i * i * 31 + 7) % VOCAB for i in range(33))
MIN_MARGIN = 2e-4  # between the best two logits: rounding turns none
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}


def edited(
    source: Path,
    target: Path,
    change_config: Callable[[Config], object] = lambda config: None,
    change_tensors: Callable[[Tensors], object] = lambda tensors: None,
) -> Path:
    """A copy of a single-file checkpoint."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    change_config(config)
    change_tensors(tensors)
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def another_head(tensors: Tensors) -> None:
    tensors[HEAD] = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(3)) * 0.2


def head_alone(tensors: Tensors) -> None:
    tensors[HEAD] = tensors.pop(EMBEDDING)


def nothing(anything: object) -> None:
    pass


def without(key: str) -> Callable[[Config], object]:
    return lambda config: config.pop(key)


def with_values(**values: object) -> Callable[[Config], object]:
    return lambda config: config.update(values)


# case: (checkpoint, change of config.json, change of tensors)
EDITS: dict[str, tuple[str, Callable[[Config], object], Callable[[Tensors], object]]] = {
    "rope_scaling beside rope_parameters": ("qwen3_moe", with_values(rope_scaling=YARN), nothing),
    "rope_theta of rope_parameters beside rope_scaling": (
        "qwen3_moe",
        with_values(rope_scaling=YARN, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        nothing,
    ),
    "yarn of original context at the top": (
        "olmoe",
        with_values(rope_scaling={"rope_type": "yarn", "factor": 4.0}, original_max_position_embeddings=40),
        nothing,
    ),
    "the original context at the top outweighs the table's": (
        "olmoe",
        with_values(
            rope_scaling=YARN | {"original_max_position_embeddings": 160}, original_max_position_embeddings=40
        ),
        nothing,
    ),
    "no rope_theta outside the table": (
        "olmoe",
        with_values(rope_theta=None, rope_scaling=YARN | {"rope_theta": 500.0}),
        nothing,
    ),
    "a head that config.json calls tied": ("mixtral-tied-stacked", nothing, another_head),
    "no norm of weights": ("deepseek_v3", with_values(norm_topk_prob=None), nothing),
    "rope in halves": ("deepseek_v3", with_values(rope_interleave=None), nothing),
    "shared experts not mentioned": ("deepseek_v3", without("n_shared_experts"), nothing),
    "a head that is the embedding": ("mixtral-tied-stacked", nothing, head_alone),
}
UNCHANGED = {"shared experts not mentioned", "a head that is the embedding"}  # in tokens


@pytest.mark.parametrize("case", EDITS)
def test_an_edit_means_what_it_does_in_transformers(tiny: Get, case: str, tmp_path: Path) -> None:
    import transformers

    name, change_config, change_tensors = EDITS[case]
    path = edited(tiny(name).path, tmp_path, change_config, change_tensors)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    expected, margin = greedy(model, PROMPT)
    assert margin > MIN_MARGIN
    runner, _ = alone(path)
    assert generate(runner, [PROMPT], NEW_TOKENS) == [expected]
    runner, _ = alone(tiny(name).path)
    assert (generate(runner, [PROMPT], NEW_TOKENS) == [expected]) is (case in UNCHANGED)


@pytest.mark.parametrize("change", [another_head, head_alone])
def test_inspect_counts_the_head_that_is_used(
    tiny: Get, change: Callable[[Tensors], object], tmp_path: Path
) -> None:
    path = edited(tiny("mixtral-tied-stacked").path, tmp_path, change_tensors=change)
    found, own = inspect_checkpoint(path), change is another_head
    assert found.unserved == 0
    assert found.parameters.get("head", 0) == own * VOCAB * HIDDEN
    assert found.parameters == inspect_config(path).parameters
    params = LoadParams(str(path), 0, (0,) * EXPERTS, "float32", compute=TorchCompute())
    plan = plan_group(rank_config(path, 1, parallel__device="cuda"))
    assert plan.weight_bytes == (load_model(params).weights.nbytes,)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("float32", Dtype.FLOAT32),
        ("bfloat16", Dtype.BFLOAT16),
        ("float16", Dtype.FLOAT32),
        ("float64", Dtype.FLOAT32),
    ],
)
@pytest.mark.parametrize("how", ["absent", "null"])
def test_auto_is_the_dtype_of_the_tensors(
    tiny: Get, stored: str, expected: Dtype, how: str, tmp_path: Path
) -> None:
    import transformers

    def cast(tensors: Tensors) -> None:
        for name, values in tensors.items():
            # The last one by name is what neither of us looks at.
            tensors[name] = values if name == max(tensors) else values.to(getattr(torch, stored))

    unnamed = without("dtype") if how == "absent" else with_values(dtype=None)
    path = edited(tiny("qwen3_moe").path, tmp_path, unnamed, cast)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert theirs.dtype is getattr(torch, stored)
    spec = read_spec(path)
    assert serving_dtype(spec, "auto") is expected
    assert (serving_dtype(spec, "float32"), serving_dtype(spec, "bfloat16")) == ("float32", "bfloat16")
    assert inspect_checkpoint(path).dtype is inspect_config(path).dtype is expected
    for compute in (None, TorchCompute()):
        model = load_model(LoadParams(str(path), 0, (0,) * EXPERTS, compute=compute))
        assert (model.dtype, model.kv_dtype) == (expected, expected)
        assert model.weights.embedding.dtype is getattr(torch, expected)
    plan = plan_group(rank_config(path, 2, model__dtype="auto"))
    assert plan.exchange.payload is (Payload.FP32 if expected is Dtype.FLOAT32 else Payload.BF16)


def test_the_first_shard_names_the_dtype(tiny: Get, tmp_path: Path) -> None:
    """Of tensors in several dtypes, the first by name in the first shard."""
    import transformers

    source = tiny("qwen3_moe").path
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    placed = {name: second if name == HEAD else first for name in sorted(tensors, reverse=True)}
    half = {name: values.bfloat16() for name, values in tensors.items() if name != HEAD}
    last = max(half)
    half[last] = half[last].float()
    save_file(half, tmp_path / first, metadata={"format": "pt"})
    save_file({HEAD: tensors[HEAD]}, tmp_path / second, metadata={"format": "pt"})
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert theirs.dtype is torch.bfloat16
    assert read_spec(tmp_path).dtype == "bfloat16"


def test_weights_that_are_not_there_name_no_dtype(tiny: Get, tmp_path: Path) -> None:
    """As of a model that transformers makes from its configuration alone: float32."""
    path = edited(tiny("mixtral-tied-stacked").path, tmp_path, without("dtype"))
    (path / "model.safetensors").unlink()
    spec = read_spec(path)
    assert (spec.dtype, spec.tied_head) == (None, True)
    assert serving_dtype(spec, "auto") is Dtype.FLOAT32
    params = LoadParams(str(path), 0, (0,) * EXPERTS, load_format="dummy")
    assert load_model(params).dtype is Dtype.FLOAT32
    assert plan_group(
        rank_config(path, 1, model__dtype="auto", model__load_format="dummy")
    ).exchange.payload is (Payload.FP32)
