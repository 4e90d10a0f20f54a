"""The checkpoints that loading is timed with have the tensors of the models, and load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import load_checkpoint
from benchmarks.load_checkpoint import Pattern, planned, write
from ep_server.backends.torch_compute import TorchCompute
from ep_server.models.checkpoint import Checkpoint
from ep_server.models.families import read_spec
from ep_server.models.inspect import inspect_config
from ep_server.models.weights import load_weights
from tests.support.models.checkpoints import CASES, EXPERTS, random_model

NAMES = ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3"]


@pytest.mark.parametrize("name", NAMES)
def test_names_and_shapes_are_those_that_transformers_saves(tmp_path: Path, name: str) -> None:
    random_model(next(case for case in CASES if case.name == name), 0).save_pretrained(tmp_path)
    expected = {one.name: one.shape for one in Checkpoint.open(tmp_path).tensors.values()}
    assert {one.name: one.shape for one in planned(read_spec(tmp_path))} == expected


@pytest.mark.parametrize("shape", ["qwen3-30b-a3b", "deepseek-v2-lite", "mixtral-8x7b"])
def test_tensors_of_a_shape_are_all_its_parameters(shape: str) -> None:
    path = str(load_checkpoint.SHAPES / shape)
    in_all = sum(one.nbytes // 2 for one in planned(read_spec(path)))
    assert in_all == inspect_config(path).total_parameters


@pytest.mark.parametrize("quantised", [False, True])
def test_a_written_checkpoint_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantised: bool
) -> None:
    model = random_model(next(case for case in CASES if case.name == "qwen3_moe"), 0)
    config = model.config.to_dict()
    if quantised:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (tmp_path / "shapes" / "tiny").mkdir(parents=True)
    (tmp_path / "shapes" / "tiny" / "config.json").write_text(json.dumps(config))
    (folder := tmp_path / "written").mkdir()
    monkeypatch.setattr(load_checkpoint, "SHAPES", tmp_path / "shapes")
    monkeypatch.setattr(load_checkpoint, "SHARD_BYTES", 30_000)
    monkeypatch.setattr(load_checkpoint, "PATTERN_WORDS", 6007)  # less than the embedding has
    spec = write(folder, "tiny", layers=1, threads=2)
    assert spec.num_layers == 1
    checkpoint, pattern = Checkpoint.open(folder), Pattern()
    assert len(checkpoint.shards) > 2
    stored = {name: values for shard in checkpoint.shards for name, values in load_file(shard).items()}
    assert stored.keys() == {one.name for one in planned(spec)}
    for name, values in stored.items():
        assert values.float().isfinite().all()
        assert pattern.expected(name, values)
        assert not pattern.expected(f"{name}.", values)
        changed = values.view(-1).view(torch.uint8).clone()
        changed[-1] ^= 1
        assert not pattern.expected(name, changed)
    weights = load_weights(checkpoint, spec, list(range(EXPERTS)), torch.bfloat16, TorchCompute())
    assert pattern.expected("model.embed_tokens.weight", weights.embedding)
