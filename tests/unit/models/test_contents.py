"""Tensors that the model does not read: those that it should have read are refused, the others are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ep_server.backends.torch_compute import TorchCompute
from ep_server.errors import CheckpointError
from ep_server.models.checkpoint import SINGLE, Checkpoint, StoredTensor
from ep_server.models.families import read_spec
from ep_server.models.inspect import Unused, inspect_checkpoint, inspect_config, unused_tensors
from ep_server.models.weights import load_weights
from tests.support.models.checkpoints import CASES, EXPERTS, Tiny
from tests.support.models.fp8 import Fp8Tiny
from tests.support.models.released_configs import DEEPSEEK_V3, QWEN3_30B

Get = Callable[[str], Tiny]


class Noting(dict[str, StoredTensor]):
    """Notes the tensors that are found."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        super().__init__(stored)
        self.found: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        if name in self:
            self.found.add(name)
        return super().get(name, default)


def changed(source: Path, target: Path, config: dict[str, Any], *tensors: str) -> Path:
    """A copy of a checkpoint with other fields and more tensors."""
    shutil.copytree(source, target)
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(values | config))
    stored = load_file(target / SINGLE)
    save_file(stored | {name: torch.ones(3) for name in tensors}, target / SINGLE)
    return target


def assert_all_are_read(path: Path, dtype: torch.dtype) -> None:
    spec, checkpoint = read_spec(path), Checkpoint.open(path)
    noting = Noting(checkpoint.tensors)
    experts = range(spec.router.num_experts)
    load_weights(replace(checkpoint, tensors=noting), spec, experts, dtype, TorchCompute())
    assert noting.found == set(checkpoint.tensors)
    assert unused_tensors(spec, "", checkpoint.tensors) == ()


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_what_the_loader_reads_is_not_called_unused(tiny: Get, name: str) -> None:
    assert_all_are_read(tiny(name).path, torch.float32)


@pytest.mark.parametrize("name", ["qwen3_moe-fp8", "deepseek_v3-fp8"])
def test_nor_are_fp8_weights_and_their_scales(fp8: Callable[[str], Fp8Tiny], name: str) -> None:
    assert_all_are_read(fp8(name).path, torch.bfloat16)


ATTENTION = "model.layers.1.self_attn"


@pytest.mark.parametrize(
    ("name", "config", "tensors", "message"),
    [
        (
            "qwen3_moe",
            {"num_hidden_layers": 1},
            (),
            r"num_hidden_layers = 1, but .* \(\d+: model\.layers\.1\.input_layernorm\.weight, ",
        ),
        ("deepseek_v3", {"num_hidden_layers": 2}, (), "num_hidden_layers = 2, but"),
        ("deepseek_v2-groups", {}, ("model.layers.3.eh_proj.weight",), "num_hidden_layers = 3, but"),
        ("qwen3_moe", {}, ("model.layers.999999999.x",), "num_hidden_layers = 2, but"),
        ("qwen3_moe", {}, (f"{ATTENTION}.q_proj.bias",), r"attention_bias is false, but .*q_proj\.bias\)"),
        ("olmoe", {}, (f"{ATTENTION}.o_proj.bias",), r"attention_bias is false, but .*o_proj\.bias\)"),
        ("deepseek_v3", {"attention_bias": False}, (), r"attention_bias is false, but .*q_a_proj\.bias"),
        (
            "deepseek_v3",
            {"n_shared_experts": 0},
            (),
            r"n_shared_experts = 0, but .*shared_experts\.down_proj",
        ),
        ("deepseek_v3-moonlight", {}, (f"{ATTENTION}.q_a_proj.weight",), "q_lora_rank = None, but"),
        ("deepseek_v3", {}, (f"{ATTENTION}.q_proj.weight",), "q_lora_rank = 20, but"),
        ("deepseek_v3", {"first_k_dense_replace": 2}, (), "first_k_dense_replace makes the layer dense, but"),
        (
            "deepseek_v3",
            {"first_k_dense_replace": 0},
            (),
            "first_k_dense_replace makes the layer sparse, but",
        ),
        (
            "qwen3_moe",
            {"mlp_only_layers": [0]},
            (),
            "mlp_only_layers or decoder_sparse_step makes the layer d",
        ),
        (
            "qwen3_moe",
            {"num_experts": EXPERTS - 1},
            (),
            r"num_experts = 5, but .*experts\.5\.down_proj\.weight",
        ),
        ("mixtral", {"num_local_experts": EXPERTS - 1}, (), "num_local_experts = 5, but"),
        ("olmoe", {"num_experts": EXPERTS - 1}, (), "num_experts = 5, but"),
        (
            "deepseek_v3-moonlight",
            {"n_routed_experts": EXPERTS - 1},
            (),
            "n_routed_experts = 5, but",
        ),
        (
            "qwen3_moe",
            {},
            (f"{ATTENTION}.q_proj.weight.quant_state.bitsandbytes__nf4", f"{ATTENTION}.q_proj.weight.absmax"),
            "no quantization_config, but .*absmax is one of bitsandbytes: weights must be F32, BF16",
        ),
        ("qwen3_moe", {}, (f"{ATTENTION}.q_proj.qweight",), "qweight is one of GPTQ or AWQ"),
    ],
)
def test_tensors_that_the_model_should_use(
    tiny: Get, tmp_path: Path, name: str, config: dict[str, Any], tensors: tuple[str, ...], message: str
) -> None:
    path = changed(tiny(name).path, tmp_path / "copy", config, *tensors)
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}"):
        inspect_checkpoint(path)


def test_other_tensors_are_named(tiny: Get, tmp_path: Path) -> None:
    names = ("visual.weight", f"{ATTENTION}.sinks", "model.a\nb", "model.layers.1.mlp.experts.2.x", "z")
    path = changed(tiny("qwen3_moe").path, tmp_path / "copy", {}, *names)
    found = inspect_checkpoint(path)
    assert found.unused == Unused(tuple(sorted(names)))
    assert found.unserved == 3 * len(names)
    assert found.parameters == inspect_checkpoint(tiny("qwen3_moe").path).parameters
    assert str(found.unused) == (
        r"there are tensors of the checkpoint that are not used (5: 'model.a\nb', "
        f"model.layers.1.mlp.experts.2.x, {ATTENTION}.sinks, ...)"
    )


def test_what_every_loader_derives_is_not_named(tiny: Get, tmp_path: Path) -> None:
    names = [
        f"{ATTENTION}.{end}" for end in ("rotary_emb.inv_freq", "k_scale", "k_proj.k_scale", "attn.v_scale")
    ]
    path = changed(tiny("qwen3_moe").path, tmp_path / "copy", {}, *names)
    found = inspect_checkpoint(path)
    assert (str(found.unused), found.unserved) == ("", 0)
    assert found.parameters == inspect_checkpoint(tiny("qwen3_moe").path).parameters


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_experts_stored_twice_are_named(tiny: Get, name: str) -> None:
    """In a stack, which is read, and one by one."""
    spec, names = read_spec(tiny(name).path), set(Checkpoint.open(tiny(name).path).tensors)
    single = {one for one in names if ".experts." in one}
    blocks = {one.partition(".experts.")[0] for one in single}
    stacks = {f"{block}.experts.{part}" for block in blocks for part in ("gate_up_proj", "down_proj")}
    assert unused_tensors(spec, "config.json", names | stacks) == tuple(sorted(single))


def test_multi_token_prediction_layers_are_named(tiny: Get, tmp_path: Path) -> None:
    layer = "model.layers.3"
    names = (
        f"{layer}.eh_proj.weight",
        f"{layer}.self_attn.o_proj.weight",
        f"{layer}.mlp.experts.9.up_proj.weight",
    )
    found = inspect_checkpoint(changed(tiny("deepseek_v3").path, tmp_path / "copy", {}, *names))
    assert found.unused.tensors == tuple(sorted(names))


REAL_QWEN3 = QWEN3_30B | {
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "max_window_layers": 48,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "transformers_version": "4.51.0",
    "use_cache": True,
}
REAL_DEEPSEEK_V3 = DEEPSEEK_V3 | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "initializer_range": 0.02,
    "pretraining_tp": 1,
    "seq_aux": True,
    "transformers_version": "4.33.1",
    "use_cache": True,
}
REAL_MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
REAL_V2_LITE = REAL_DEEPSEEK_V3 | {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "norm_topk_prob": False,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": None,
    "quantization_config": None,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "num_nextn_predict_layers": None,
}


@pytest.mark.parametrize("config", [REAL_QWEN3, REAL_DEEPSEEK_V3, REAL_MIXTRAL, REAL_V2_LITE])
def test_released_configs_have_no_unread_keys(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert inspect_config(tmp_path).unused == Unused()


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_nor_have_those_that_transformers_writes(tiny: Get, name: str) -> None:
    assert inspect_checkpoint(tiny(name).path).unused == Unused()


@pytest.mark.parametrize(
    ("change", "unread"),
    [
        ({"logit_scale": 0.0625}, ("logit_scale",)),
        ({"use_qk_norm": False, "mlp_bias": True}, ("use_qk_norm", "mlp_bias")),
        ({"nothing": None, "none": [], "empty": {}}, ()),
        ({"num_local_experts": 64}, ("num_local_experts",)),  # another spelling that says otherwise
        ({"num_local_experts": 128, "dtype": "bfloat16"}, ()),
        ({"dtype": "float32"}, ("torch_dtype",)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "low_freq_factor": 1.0}},
            ("rope_scaling.low_freq_factor",),
        ),
        (
            {"rope_parameters": {name: {"rope_type": "default", "x": 1} for name in "ab"}},
            ("rope_parameters.a.x",),
        ),
        (  # transformers takes the first alone
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 5.0}},
            ("rope_parameters",),
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "x": {"y": 1}}},
            ("quantization_config.x",),
        ),
    ],
)
def test_unread_keys_are_named(tmp_path: Path, change: dict[str, Any], unread: tuple[str, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REAL_QWEN3 | change))
    assert inspect_config(tmp_path).unused == Unused(keys=unread)
