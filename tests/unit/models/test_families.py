"""config.json of transformers 4 and 5 to the same ModelSpec; what is wrong is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ep_server.errors import CheckpointError
from ep_server.models.families import FAMILIES, read_spec
from ep_server.models.families.spec import GqaSpec, GroupScore, MlaSpec, QkNorm, RopeType, Score
from tests.support.models.checkpoints import CASES, Tiny
from tests.support.models.released_configs import DEEPSEEK_V3, QWEN3_30B


def write(folder: Path, config: dict[str, Any], name: str = "config.json") -> Path:
    (folder / name).write_text(json.dumps(config))
    return folder


def as_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """The same config in the spellings that transformers 4 wrote."""
    old = dict(config)
    rope = dict(old.pop("rope_parameters"))
    old["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    old["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    old["torch_dtype"] = old.pop("dtype")
    if old["model_type"] == "qwen3_moe":
        old["num_experts"] = old.pop("num_local_experts")
    return old


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_both_spellings_mean_the_same(tiny: Callable[[str], Tiny], name: str, tmp_path: Path) -> None:
    path = tiny(name).path
    new = json.loads((path / "config.json").read_text())
    old = as_version_4(new)
    assert set(new) - set(old) >= {"rope_parameters", "dtype"}
    assert read_spec(write(tmp_path, old)) == read_spec(path)


def test_a_released_qwen3_moe(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path, QWEN3_30B))
    assert spec.attention == GqaSpec(32, 4, 128, 128**-0.5, QkNorm.HEAD)
    assert (spec.router.num_experts, spec.router.top_k, spec.router.renormalise) == (128, 8, True)
    assert spec.sparse_layers == (True,) * 48
    assert (spec.rope.theta, spec.rope.interleaved, spec.dtype) == (1e6, False, "bfloat16")
    assert spec.kv_values_per_token == 48 * 2 * 4 * 128


def test_a_released_deepseek_v3(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path, DEEPSEEK_V3))
    attention = spec.attention
    assert isinstance(attention, MlaSpec)
    assert attention.scale == pytest.approx(0.1352337788608801)  # 192^-0.5 * (0.1 ln 40 + 1)^2
    assert (attention.q_lora, attention.kv_lora, attention.v_dim) == (1536, 512, 128)
    assert (spec.rope.type, spec.rope.interleaved, spec.rope.attention_factor) == (RopeType.YARN, True, 1.0)
    router = spec.router
    assert (router.score, router.group_score) == (Score.SIGMOID, GroupScore.TOP2_SUM)
    assert (router.groups, router.top_groups, router.scale, router.bias) == (8, 4, 2.5, True)
    assert spec.sparse_layers == (False,) * 3 + (True,) * 58
    assert (spec.shared_ffn, spec.quant_block) == (2048, (128, 128))
    assert spec.kv_values_per_token == 61 * 576


def test_an_architecture_under_another_model_type(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path, DEEPSEEK_V3 | {"model_type": "kimi_k2"}))
    assert spec.family == "deepseek_v3"


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (1, None, (1,)),
        ([1, 2], None, (1, 2)),
        (None, None, ()),
        (1, {"eos_token_id": 7}, (7,)),
        (1, {"eos_token_id": [7, 8]}, (7, 8)),
        (1, {"temperature": 0.6}, (1,)),
    ],
)
def test_eos_ids(tmp_path: Path, config_eos: Any, generation: Any, expected: tuple[int, ...]) -> None:
    write(tmp_path, QWEN3_30B | {"eos_token_id": config_eos})
    if generation is not None:
        write(tmp_path, generation, "generation_config.json")
    assert read_spec(tmp_path).eos_token_ids == expected


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    write(tmp_path, {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    with pytest.raises(CheckpointError, match=r"config\.json: model_type = 'llama': unknown") as error:
        read_spec(tmp_path)
    assert all(family in str(error.value) for family in FAMILIES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size = null: must be an integer of at least 1"),
        ({"num_experts": None}, "num_experts = null: must be an integer"),
        ({"hidden_size": "2048"}, "hidden_size = '2048': must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0: must be an integer of at least 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: must be an integer of at most 4096"),
        ({"hidden_size": 2**63}, "hidden_size = 9223372036854775808: must be an integer of at most"),
        ({"max_position_embeddings": 1 << 25}, "max_position_embeddings = 33554432: .* at most 16777216"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan: must be a finite number above 0"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps = -1e-06: must be a finite number above 0"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps = 1000+: must be a finite number"),
        ({"rope_theta": 0}, "rope_theta = 0: must be a finite number above 1"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, "factor = -2: must be a finite number above 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, "factor = 0: must be a finite number above 0"),
        (
            {"rope_scaling": {"type": "yarn", "beta_fast": 0}},
            "beta_fast = 0: must be a finite number above 0",
        ),
        ({"mlp_only_layers": 5}, "mlp_only_layers = 5: must be a list of integers of at least 0"),
        ({"mlp_only_layers": [[1]]}, r"mlp_only_layers = \[\[1\]\]: must be a list of integers"),
        ({"mlp_only_layers": "12"}, "mlp_only_layers = '12': must be a list of integers"),
        ({"num_key_value_heads": 5}, "num_key_value_heads = 5: must be a divisor"),
        ({"head_dim": 33}, "head_dim = 33: must be even"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': must be one of silu"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok = 200: must be at most 128"),
        ({"num_experts_per_tok": 17}, r"config\.json: num_experts_per_tok = 17: must be at most 16: kernels"),
        ({"num_hidden_layers": ...}, "num_hidden_layers is missing"),
        (
            {"layer_types": "x", "rope_scaling": {"full_attention": {}}},
            "layer_types = 'x': must be a list of strings",
        ),
        (
            {"original_max_position_embeddings": 0, "rope_scaling": {"type": "yarn"}},
            "embeddings = 0: must be",
        ),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling: type = 'longrope': must be one of default"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_parameters": {"type": "linear"}}, "rope_parameters: factor is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: must be 1"),
        ({"dtype": None, "torch_dtype": "int8"}, "torch_dtype = 'int8': must be one of float32"),
        ({"norm_topk_prob": 1}, "norm_topk_prob = 1: must be true or false"),
        ({"eos_token_id": ["a"]}, "eos_token_id = .* must be a token id"),
        (
            {"eos_token_id": [1, -3]},
            r"eos_token_id = \[1, -3\]: must be a token id or a list of them, 0 or more",
        ),
        *(
            (
                {"quantization_config": given},
                rf"quant_method = '?{named}'?: must be fp8 \(.* GPTQ, AWQ .* not read",
            )
            for given, named in (
                ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
                ({"load_in_4bit": False, "load_in_8bit": True, "llm_int8_threshold": 6.0}, "bitsandbytes"),
                ({"quant_method": None, "load_in_4bit": True}, "bitsandbytes"),
                ({"quant_method": "gptq", "bits": 4}, "gptq"),
                ({"quant_method": "awq"}, "awq"),
                ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
                ({"quant_method": ["fp8"]}, r"\['fp8'\]"),
                ({"bits": 4}, "null"),
            )
        ),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "weight_block_size"),
        ({"rope_scaling": 3}, "rope_scaling = 3: must be an object"),
        ({"model_type": ["qwen3_moe"], "architectures": None}, r"model_type = \['qwen3_moe'\]: unknown"),
        ({"model_type": "x", "architectures": 5}, "model_type = 'x': unknown architecture"),
        ({"model_type": {}, "architectures": [{}, "x"]}, "model_type = {}: unknown architecture"),
    ],
)
def test_fields_out_of_range(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        given = {key: value for key, value in (QWEN3_30B | change).items() if value is not ...}
        read_spec(write(tmp_path, given))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_k_dense_replace": None}, "first_k_dense_replace = null: must be an integer of at least 0"),
        ({"routed_scaling_factor": None}, "routed_scaling_factor = null: must be a finite number"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim = 7: must be even"),
        ({"n_group": 7}, "n_group = 7: must be a divisor"),
        ({"topk_group": 9}, "topk_group = 9: must be at most n_group"),
        ({"n_group": 64, "topk_group": 1}, "topk_group = 1: .* enough for top-8"),
        ({"n_group": 256, "topk_group": 8}, "n_group = 256: must be at most 128: the 2 best of a group's"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy': must be one of noaux_tc"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2: must be 1"),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob = True: must be false"),
    ],
)
def test_deepseek_fields_out_of_range(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_spec(write(tmp_path, DEEPSEEK_V3 | change))


def test_broken_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        read_spec(tmp_path)
    with pytest.raises(CheckpointError, match="absent: not a directory"):
        read_spec(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds list, expected an object"):
        read_spec(tmp_path)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}


@pytest.mark.parametrize(
    "rope",
    [
        pytest.param({"rope_scaling": {"full_attention": YARN}}, id="one type"),
        pytest.param({"rope_parameters": {"full_attention": YARN, "sliding_attention": YARN}}, id="alike"),
        pytest.param(
            {
                "rope_parameters": {"full_attention": YARN, "sliding_attention": LINEAR},
                "layer_types": ["full_attention"] * 48,
            },
            id="one in use",
        ),
    ],
)
def test_rope_nested_per_layer_type(tmp_path: Path, rope: dict[str, Any]) -> None:
    """transformers reads no such table for these families, and runs default rope of base 10000."""
    flat = read_spec(write(tmp_path, QWEN3_30B | {"rope_scaling": YARN})).rope
    assert flat.type is RopeType.YARN
    assert read_spec(write(tmp_path, QWEN3_30B | rope)).rope == flat


@pytest.mark.parametrize(
    "layer_types", [None, ["full_attention", "sliding_attention"], ["chunked_attention"]], ids=str
)
def test_rope_that_differs_between_layers(tmp_path: Path, layer_types: list[str] | None) -> None:
    nested = {"full_attention": YARN, "sliding_attention": LINEAR}
    write(tmp_path, QWEN3_30B | {"rope_parameters": nested, "layer_types": layer_types})
    message = (
        "rope_parameters: full_attention, sliding_attention: must be the same for all layer types in use"
    )
    with pytest.raises(CheckpointError, match=message):
        read_spec(tmp_path)
