"""What a rank reads of a checkpoint, from every layout on disk; what is broken is named."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ep_server.backends.assembly import LoadParams, load_model, loading_threads
from ep_server.backends.torch_compute import TorchCompute
from ep_server.errors import CheckpointError, ConfigError
from ep_server.models.checkpoint import Checkpoint
from ep_server.models.families import read_spec
from ep_server.models.footprint import footprint
from ep_server.models.inspect import inspect_checkpoint
from ep_server.models.layers import ModelWeights, MoeWeights, tensors_of
from ep_server.models.sizes import Dtype
from ep_server.models.weights import load_weights
from tests.support.compare import assert_equal
from tests.support.models.checkpoints import CASES, EXPERTS, HIDDEN, VOCAB, Tiny, random_model

Get = Callable[[str], Tiny]


def load(path: Path, experts: list[int], dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(Checkpoint.open(path), read_spec(path), experts, dtype, TorchCompute())


def rewrite(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a single-file checkpoint with other tensors."""
    target.mkdir(exist_ok=True)
    shutil.copy(source / "config.json", target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def sparse(weights: ModelWeights) -> list[MoeWeights]:
    return [layer.ffn for layer in weights.layers if isinstance(layer.ffn, MoeWeights)]


def test_a_rank_reads_only_its_experts(tiny: Get, tmp_path: Path) -> None:
    path = tiny("qwen3_moe").path
    everything = load(path, list(range(EXPERTS)))

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if ".experts." in n and ".experts.1." not in n and ".5." not in n]:
            del tensors[name]

    part = load(rewrite(path, tmp_path / "part", drop), [1, 5])
    for own, full in zip(sparse(part), sparse(everything), strict=True):
        assert_equal(own.experts.gate_up, full.experts.gate_up[[1, 5]], "gate_up")
        assert_equal(own.experts.down, full.experts.down[[1, 5]], "down")
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.0\.mlp\.experts\.0\.gate_proj\.weight"):
        load(tmp_path / "part", [0])
    none = load(path, [])
    assert all(len(moe.experts.down) == 0 for moe in sparse(none))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_stacked_experts_equal_single_ones(tiny: Get, tmp_path: Path, name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    model = random_model(case, seed=9)
    model.save_pretrained(tmp_path / "single")
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    stored = Checkpoint.open(tmp_path / "stacked").tensors
    assert any(tensor.endswith("mlp.experts.gate_up_proj") for tensor in stored)
    one, two = load(tmp_path / "single", [0, 4]), load(tmp_path / "stacked", [0, 4])
    for a, b in zip(sparse(one), sparse(two), strict=True):
        assert_equal(a.experts.gate_up, b.experts.gate_up, "gate_up")
        assert_equal(a.experts.down, b.experts.down, "down")
        assert_equal(a.router.weight, b.router.weight, "router")


@pytest.mark.parametrize("rows, columns", [(16, 32), (24, 20)])
def test_fp8_blocks_are_dequantised(tiny: Get, tmp_path: Path, rows: int, columns: int) -> None:
    path = tiny("deepseek_v3").path
    plain: dict[str, torch.Tensor] = {}

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("proj.weight")]:
            weight = tensors[name]
            grid = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
            scale, codes = torch.empty(grid), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
            restored = torch.empty_like(weight)
            for i in range(grid[0]):
                for j in range(grid[1]):
                    at = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                    scale[i, j] = weight[at].abs().max() / 448
                    codes[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
                    restored[at] = codes[at].float() * scale[i, j]
            tensors[name], tensors[f"{name}_scale_inv"], plain[name] = codes, scale, restored

    quantised = rewrite(path, tmp_path / "fp8", quantise)
    config = json.loads((quantised / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"is FP8 but config\.json has no quantization_config"):
        load(quantised, [0])
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [rows, columns]}
    (quantised / "config.json").write_text(json.dumps(config))
    restored = rewrite(path, tmp_path / "plain", lambda tensors: tensors.update(plain))
    one, two = load(quantised, [0, 3]), load(restored, [0, 3])
    for a, b in zip(tensors_of(one), tensors_of(two), strict=True):
        assert_equal(a, b, "dequantised")


@pytest.mark.parametrize("name", [case.name for case in CASES])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inspect_predicts_the_memory(tiny: Get, name: str, dtype: str) -> None:
    placement = (2, 0, 0, 2, 2, 0)
    found = inspect_checkpoint(tiny(name).path, dtype)
    for compute in (None, TorchCompute()):  # packed into whole panels, and as they are
        params = [LoadParams(str(tiny(name).path), r, placement, dtype, compute=compute) for r in range(3)]
        loaded = tuple(load_model(p).weights.nbytes for p in params)
        sizes = footprint(found.spec, found.dtype, packed=compute is None)
        assert sizes.rank_bytes(placement, 3) == loaded
        assert loaded[0] == loaded[2] > loaded[1]
    oracle = sum(p.numel() for p in random_model(tiny(name).case, 0).state_dict().values())
    tied = VOCAB * HIDDEN if found.spec.tied_head else 0  # state_dict names a tied head twice
    assert found.total_parameters == oracle - tied
    idle = found.parameters["experts"] * (EXPERTS - 3) // EXPERTS
    assert found.active_parameters == found.total_parameters - idle


def test_a_tied_head_is_the_embedding(tiny: Get) -> None:
    weights = load(tiny("mixtral-tied-stacked").path, [0])
    assert weights.head.weight is weights.embedding
    assert load(tiny("mixtral").path, [0]).head.weight is not weights.embedding


def test_multi_token_prediction_layers_are_not_read(tiny: Get, tmp_path: Path) -> None:
    path = tiny("deepseek_v3").path
    extra = {f"model.layers.3.{n}.weight": torch.full((5, 7), float("nan")) for n in ("enorm", "eh_proj")}
    longer = rewrite(path, tmp_path / "mtp", lambda tensors: tensors.update(extra))
    assert len(load(longer, [0]).layers) == 3
    assert inspect_checkpoint(longer).unserved == 70


def test_progress(tiny: Get) -> None:
    seen: list[tuple[str, int, int]] = []
    path = tiny("olmoe").path
    load_model(LoadParams(str(path), 0, (0,) * EXPERTS), lambda *call: seen.append(call))
    assert seen == [("weights", i, 2) for i in range(3)]


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_layers_made_at_once_are_those_made_in_turn(tiny: Get, name: str) -> None:
    path, told_by = tiny(name).path, set()
    spec, checkpoint = read_spec(path), Checkpoint.open(path)
    several = load_weights(
        checkpoint,
        spec,
        [0, 4],
        torch.float32,
        TorchCompute(),
        lambda *_: told_by.add(threading.current_thread()),
        threads=3,
    )
    assert told_by == {threading.main_thread()}
    for a, b in zip(tensors_of(several), tensors_of(load(path, [0, 4])), strict=True):
        assert_equal(a, b, name)


@pytest.mark.parametrize(
    ("experts", "threads", "expected"),
    [(4, 2, 2), (4, 9, 4), (0, 9, 4), (96, 9, 3), (192, 9, 1)],
)
def test_layers_in_the_making_are_bounded(tiny: Get, experts: int, threads: int, expected: int) -> None:
    """7 MB an expert: 96 of them are 0.68 GB, and three such layers fit into 2 GiB."""
    spec = dataclasses.replace(read_spec(tiny("olmoe").path), hidden=1024, expert_ffn=1152)
    assert loading_threads(spec, Dtype.BFLOAT16, experts, threads) == expected


def test_an_error_in_one_layer_ends_all(tiny: Get, tmp_path: Path) -> None:
    lost = "model.layers.1.mlp.experts.3.up_proj.weight"
    path = rewrite(tiny("qwen3_moe").path, tmp_path / "broken", lambda tensors: tensors.pop(lost))
    before = threading.active_count()
    with pytest.raises(CheckpointError, match=lost):
        load_model(LoadParams(str(path), 0, (0,) * EXPERTS, threads=3))
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.norm.weight"),
            r"tensor model\.norm\.weight \[64\] is missing",
        ),
        (lambda t: t.pop("lm_head.weight"), r"tensor lm_head\.weight \[256, 64\] is missing"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(63)}),
            r"model\.safetensors: tensor model\.norm\.weight: expected shape \[64\], found \[63\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int32)}),
            r"model\.norm\.weight: dtype I32, expected F32",
        ),
    ],
)
def test_brokentensors_of(tiny: Get, tmp_path: Path, change: Callable[[Any], Any], message: str) -> None:
    path = rewrite(tiny("qwen3_moe").path, tmp_path / "broken", change)
    with pytest.raises(CheckpointError, match=message):
        load(path, [0])


def test_broken_shards(tiny: Get, tmp_path: Path) -> None:
    source = tiny("qwen3_moe-dense-layer-bias-shards").path
    path = tmp_path / "shards"
    shutil.copytree(source, path)
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) > 2
    whole = shards[1].read_bytes()
    index = path / "model.safetensors.index.json"
    text = index.read_text()

    def fails(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(path)

    shards[1].write_bytes(whole[:-1])
    fails(f"{shards[1].name}: tensor .* does not fit")
    shards[1].write_bytes(b"\xff" * 100)
    fails(f"{shards[1].name}: not a safetensors file")
    shards[1].write_bytes((40).to_bytes(8, "little") + b"x" * 40)
    fails(f"{shards[1].name}: not a safetensors file")
    for header in (b"[]", b'{"a": 3}', b'{"a": {"dtype": "F32", "shape": [1]}}'):
        shards[1].write_bytes(len(header).to_bytes(8, "little") + header)
        fails(f"{shards[1].name}: not a safetensors file .malformed header")
    header = b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}'
    shards[1].write_bytes(len(header).to_bytes(8, "little") + header)
    fails(f"{shards[1].name}: tensor a: .* does not fit")
    shards[1].write_bytes(b"")
    fails(f"{shards[1].name}: not a safetensors file")
    shards[1].unlink()
    fails(f"{shards[1].name}: shard cannot be read")
    shards[1].write_bytes(whole)
    entries = json.loads(text)
    entries["weight_map"]["model.extra"] = shards[0].name
    index.write_text(json.dumps(entries))
    fails(f"{shards[0].name}: tensor model.extra is missing")
    index.write_text("{}")
    fails("weight_map is missing")
    index.unlink()
    fails(r"neither model\.safetensors nor model\.safetensors\.index\.json")
    index.write_text(text)
    assert len(load(path, [0, 1]).layers) == 3


def test_load_parameters_are_checked(tiny: Get) -> None:
    path = str(tiny("qwen3_moe").path)
    with pytest.raises(ConfigError, match=r"placement = .* one rank for each of 6 experts"):
        load_model(LoadParams(path, 0, (0,) * 5))
    with pytest.raises(ConfigError, match=r"model\.max_context = 161: must be at most the model's 160"):
        load_model(LoadParams(path, 0, (0,) * 6, max_context=161))
    model = load_model(LoadParams(path, 0, (0,) * 6, max_context=100))
    assert (model.max_context, model.dtype) == (100, Dtype.FLOAT32)
    assert load_model(LoadParams(path, 0, (0,) * 6, "bfloat16")).dtype is Dtype.BFLOAT16
