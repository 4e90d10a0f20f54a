"""FP8 experts stay what is in the file, block by block; sizes are told before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ep_server.backends.assembly import LoadParams, load_model
from ep_server.backends.cpu.native_compute import NativeCompute
from ep_server.backends.torch_compute import TorchCompute, TorchGatedFfn
from ep_server.errors import CheckpointError, InternalError
from ep_server.models.checkpoint import Checkpoint
from ep_server.models.compute import FfnScales
from ep_server.models.families import read_spec
from ep_server.models.footprint import footprint
from ep_server.models.inspect import inspect_checkpoint, inspect_config
from ep_server.models.layers import KvScales, ModelWeights, MoeWeights
from ep_server.models.loading import widen
from ep_server.models.sizes import Dtype
from ep_server.models.weights import load_weights
from tests.support.compare import assert_close, assert_equal
from tests.support.models.fp8 import BLOCK, EXPERTS, Fp8Tiny, quantise, to_fp8

Fp8 = Callable[[str], Fp8Tiny]
NAMES = ["qwen3_moe-fp8", "deepseek_v3-fp8"]
FFN, HIDDEN = 160, 256
BF16 = torch.bfloat16


def load(path: Path, experts: list[int], dtype: torch.dtype = BF16) -> ModelWeights:
    return load_weights(Checkpoint.open(path), read_spec(path), experts, dtype, TorchCompute())


def ffns(weights: ModelWeights) -> list[TorchGatedFfn]:
    return [layer.ffn.experts for layer in weights.layers if isinstance(layer.ffn, MoeWeights)]


def rewritten(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("name", NAMES)
def test_codes_and_scales_are_those_of_the_file(fp8: Fp8, name: str) -> None:
    """160 channels are a block and a part of one: the scales of `up` begin with a block of their own."""
    path = fp8(name).path
    stored = load_file(path / "model.safetensors")
    weights, sparse = load(path, [1, 3]), read_spec(path).sparse_layers
    layers = [i for i, is_sparse in enumerate(sparse) if is_sparse]
    assert layers
    for index, ffn in zip(layers, ffns(weights), strict=True):
        assert ffn.scales is not None and ffn.gate_up.dtype is ffn.down.dtype is torch.float8_e4m3fn
        for row, expert in enumerate((1, 3)):
            one = f"model.layers.{index}.mlp.experts.{expert}"
            gate_up = torch.cat([stored[f"{one}.{part}_proj.weight"] for part in ("gate", "up")])
            scale = torch.cat([stored[f"{one}.{part}_proj.weight_scale_inv"] for part in ("gate", "up")])
            assert scale.shape == (4, 2)
            assert_equal(ffn.gate_up[row], gate_up, "gate_up")
            assert_equal(ffn.scales.gate_up[row], scale, "scales of gate_up")
            assert_equal(ffn.down[row], stored[f"{one}.down_proj.weight"], "down")
            assert_equal(ffn.scales.down[row], stored[f"{one}.down_proj.weight_scale_inv"], "scales of down")


@pytest.mark.parametrize("name", NAMES)
def test_everything_else_is_widened(fp8: Fp8, name: str) -> None:
    """Attention, shared experts and dense FFNs; and all of it in float32, on the CPU, or in other blocks."""
    made = fp8(name)
    kept, plain = load(made.path, [0, 2]), load(made.plain, [0, 2])
    for a, b in zip(kept.layers, plain.layers, strict=True):
        assert_equal(a.attention.out.weight, b.attention.out.weight, "o_proj")
        if isinstance(a.ffn, MoeWeights) and a.ffn.shared is not None:
            assert_equal(a.ffn.shared.down, b.ffn.shared.down, "shared")
        elif not isinstance(a.ffn, MoeWeights):
            assert_equal(a.ffn.gate_up, b.ffn.gate_up, "dense")
    for a, b in zip(
        ffns(load(made.path, [0], torch.float32)), ffns(load(made.plain, [0], torch.float32)), strict=True
    ):
        assert a.scales is None
        assert_equal(a.gate_up, b.gate_up, "float32")
        assert_equal(a.down, b.down, "float32")


def test_other_blocks_are_widened(fp8: Fp8, tmp_path: Path) -> None:
    path = to_fp8(fp8(NAMES[0]).plain, tmp_path / "small", (64, 128))
    for ffn in ffns(load(path, [0])):
        assert ffn.scales is None and ffn.down.dtype is BF16
    assert footprint(read_spec(path), Dtype.BFLOAT16, packed=False).expert == 3 * FFN * HIDDEN * 2


def test_the_cpu_serves_values(fp8: Fp8) -> None:
    made = fp8(NAMES[0])
    of = [
        load_model(LoadParams(str(p), 0, (0,) * EXPERTS, "bfloat16")).weights for p in (made.path, made.plain)
    ]
    for a, b in zip(*([layer.ffn.experts for layer in w.layers] for w in of), strict=True):
        assert_equal(a.down, b.down, "packed")
    codes = torch.zeros(1, 4, 4, dtype=torch.float8_e4m3fn)
    with pytest.raises(InternalError, match="float8_e4m3fn"):
        NativeCompute().gated_ffn(
            codes[:, :2], codes[:, :, :1], FfnScales(torch.ones(1, 2, 1), torch.ones(1, 1, 1))
        )


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_product_of_codes_is_that_of_values(fp8: Fp8, name: str) -> None:
    made, rows = fp8(name), torch.randn(7, HIDDEN)
    offsets = torch.tensor([0, 4, 4, 7])
    for kept, plain in zip(
        ffns(load(made.path, [0, 1, 2])), ffns(load(made.plain, [0, 1, 2], torch.float32)), strict=True
    ):
        assert_close(kept(rows, offsets), plain(rows, offsets), "float32", abs_tol=1e-5)


def stacked(source: Path, target: Path, ffn: int) -> Path:
    """A checkpoint of one stacked tensor per layer, of experts with `ffn` channels."""
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": ffn}))
    tensors = load_file(source / "model.safetensors")
    for name in [n for n in tensors if ".experts." in n]:
        del tensors[name]
    for layer in range(config["num_hidden_layers"]):
        for part, (rows, columns) in {"gate_up_proj": (2 * ffn, HIDDEN), "down_proj": (HIDDEN, ffn)}.items():
            codes = [quantise(torch.randn(rows, columns)) for _ in range(EXPERTS)]
            name = f"model.layers.{layer}.mlp.experts.{part}"
            tensors[name] = torch.stack([c.values.view(torch.uint8) for c in codes]).view(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.stack([c.scale for c in codes])
    save_file(tensors, target / "model.safetensors")
    return target


def test_stacked_experts_stay_codes(fp8: Fp8, tmp_path: Path) -> None:
    path = stacked(fp8(NAMES[0]).path, tmp_path / "stacked", 128)
    stored = load_file(path / "model.safetensors")
    for index, ffn in enumerate(ffns(load(path, [0, 3]))):
        for part, values, scale in (
            ("gate_up_proj", ffn.gate_up, ffn.scales.gate_up),
            ("down_proj", ffn.down, ffn.scales.down),
        ):
            name = f"model.layers.{index}.mlp.experts.{part}"
            assert_equal(values, stored[name].view(torch.uint8)[[0, 3]].view(values.dtype), part)
            assert_equal(scale, stored[f"{name}_scale_inv"][[0, 3]], part)
    shared = stacked(fp8(NAMES[0]).path, tmp_path / "shared-block", 160)
    with pytest.raises(CheckpointError, match=r"gate_up_proj: a block of 128 rows .* 160 channels"):
        load(shared, [0])
    assert ffns(load(shared, [0], torch.float32))


def test_a_layer_whose_experts_differ_is_refused(fp8: Fp8, tmp_path: Path) -> None:
    shutil.copytree(fp8(NAMES[0]).path, tmp_path / "mixed")
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    path = rewritten(tmp_path / "mixed", lambda t: t.update({name: torch.zeros(HIDDEN, FFN)}))
    with pytest.raises(CheckpointError, match=rf"{name}: dtype F32, expected F8_E4M3 like other experts"):
        load(path, [0, 2])
    assert ffns(load(path, [2], torch.float32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sizes_are_foretold(fp8: Fp8, name: str, dtype: str) -> None:
    placement, path = (1, 0, 1, 1), str(fp8(name).path)
    for compute in (None, TorchCompute()):
        models = [load_model(LoadParams(path, rank, placement, dtype, compute=compute)) for rank in (0, 1)]
        sizes = footprint(read_spec(path), Dtype(dtype), packed=compute is None)
        assert sizes.rank_bytes(placement, 2) == tuple(model.weights.nbytes for model in models)
    if dtype == "bfloat16":
        assert sizes.expert == 3 * FFN * HIDDEN + 4 * (4 * 2 + 2 * 2)
    found, served = inspect_checkpoint(path, dtype), inspect_checkpoint(fp8(name).plain, dtype)
    assert found.parameters == served.parameters == inspect_config(path, dtype).parameters
    assert found.kv_bytes_per_token == served.kv_bytes_per_token
    small = inspect_checkpoint(path, dtype, "fp8_e4m3")
    assert small.kv_bytes_per_token * Dtype(dtype).itemsize == found.kv_bytes_per_token


@pytest.mark.parametrize("name", NAMES)
def test_made_up_weights_are_codes_too(fp8: Fp8, tmp_path: Path, name: str) -> None:
    """The same for every number of ranks, and in float32 the values of these codes."""
    shutil.copy(fp8(name).path / "config.json", tmp_path)
    made_up = LoadParams(
        str(tmp_path), 0, (0,) * EXPERTS, compute=TorchCompute(), load_format="dummy", seed=3
    )
    whole, values = load_model(made_up), load_model(replace(made_up, dtype="float32"))
    part = load_model(replace(made_up, placement=(1, 0, 1, 0)))
    for one, some, wide in zip(*(ffns(m.weights) for m in (whole, part, values)), strict=True):
        assert one.gate_up.dtype is torch.float8_e4m3fn and wide.gate_up.dtype is torch.float32
        assert_equal(some.gate_up, one.gate_up.view(torch.uint8)[[1, 3]].view(some.gate_up.dtype), "part")
        assert_equal(some.scales.down, one.scales.down[[1, 3]], "scales of a part")
        for e in range(EXPERTS):
            assert_equal(wide.down[e], widen(one.down[e], one.scales.down[e], BLOCK), "values")
        spread = wide.down.std() * FFN**0.5
        assert 0.9 < spread < 1.1 and len(one.down.view(torch.uint8).unique()) > 200
    sizes = footprint(whole.spec, Dtype.BFLOAT16, packed=False)
    assert sizes.rank_bytes((0,) * EXPERTS, 1) == (whole.weights.nbytes,)


def scales_of(path: Path) -> list[KvScales | None]:
    return [layer.kv_scales for layer in load(path, [0]).layers]


@pytest.mark.parametrize(
    "place", ["self_attn.{}_scale", "self_attn.attn.{}_scale", "self_attn.{}_proj.{}_scale"]
)
@pytest.mark.parametrize("shape", [(), (1,), (2,)], ids=str)
def test_scales_of_the_cache_are_read(fp8: Fp8, tmp_path: Path, place: str, shape: tuple[int, ...]) -> None:
    """Of one layer, where the other has none."""
    shutil.copytree(fp8(NAMES[0]).path, tmp_path / "scaled")
    given = {
        f"model.layers.1.{place.format(kind, kind)}": value * torch.arange(1, 3)[: len(shape) + 1].view(shape)
        if shape == (2,)
        else torch.full(shape, value)
        for kind, value in (("k", 0.25), ("v", 0.5))
    }
    path = rewritten(tmp_path / "scaled", lambda tensors: tensors.update(given))
    first, second = scales_of(path)
    assert first is None and second is not None and second.v is not None
    assert second.k.tolist() == ([0.25, 0.5] if shape == (2,) else [0.25, 0.25])
    assert second.v.tolist() == ([0.5, 1.0] if shape == (2,) else [0.5, 0.5])
    assert inspect_checkpoint(path).parameters == inspect_checkpoint(fp8(NAMES[0]).path).parameters


def test_the_scale_of_a_latent(fp8: Fp8, tmp_path: Path) -> None:
    shutil.copytree(fp8(NAMES[1]).path, tmp_path / "scaled")
    given = {f"model.layers.0.self_attn.{kind}_scale": torch.tensor(0.5) for kind in "kv"}
    first, second = scales_of(rewritten(tmp_path / "scaled", lambda tensors: tensors.update(given)))[:2]
    assert first is not None and (first.k.tolist(), first.v) == ([0.5], None)
    assert second is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"k_scale": torch.ones(1)}, "there is a k_scale of the KV cache, but no v_scale"),
        ({"v_scale": torch.ones(1)}, "there is a v_scale of the KV cache, but no k_scale"),
        ({"k_scale": torch.ones(3)}, r"k_scale: expected 1 or 2 elements, found shape \[3\]"),
        ({"k_scale": torch.zeros(1)}, r"k_scale = \[0\.0\]: must be positive numbers"),
        ({"k_scale": torch.tensor(float("nan"))}, r"k_scale = \[nan\]: must be positive numbers"),
        ({"k_scale": torch.ones(1, dtype=torch.int32)}, "k_scale: dtype I32"),
    ],
)
def test_broken_scales_of_the_cache(
    fp8: Fp8, tmp_path: Path, given: dict[str, torch.Tensor], message: str
) -> None:
    shutil.copytree(fp8(NAMES[0]).path, tmp_path / "broken")
    named = {f"model.layers.0.self_attn.{name}": value for name, value in given.items()}
    path = rewritten(tmp_path / "broken", lambda tensors: tensors.update(named))
    with pytest.raises(CheckpointError, match=message):
        load(path, [0])
