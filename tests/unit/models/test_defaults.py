"""A key of config.json that is absent or null means what it means to transformers.

For each family and each key that we read, the key is dropped and nulled, and our ModelSpec is compared with a
model that transformers builds and runs from the same values. Deliberate differences are listed with reasons.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from ep_server.errors import CheckpointError
from ep_server.models.attention import frequencies
from ep_server.models.families import FAMILIES
from ep_server.models.families.fields import Fields
from ep_server.models.families.spec import GqaSpec, ModelSpec

REFUSED = "refused"
ABSENT, NULL = "absent", "null"
Values = dict[str, Any]

_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 24,
    "beta_fast": 8.0,
    "beta_slow": 2.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "attention_factor": 1.25,
    "truncate": False,
    "partial_rotary_factor": 1.0,
}
_SHARED: Values = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-4,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 5,
    "eos_token_id": [6, 7],
    "pad_token_id": None,
    "dtype": "float32",
    "rope_theta": 500.0,
    "partial_rotary_factor": 1.0,
    "rope_scaling": _YARN,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    "original_max_position_embeddings": 16,
}
_GQA = _SHARED | {"num_key_value_heads": 2, "head_dim": 8}
_MLA = _SHARED | {
    "num_key_value_heads": 16,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 8,
    "v_head_dim": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 3,
    "moe_intermediate_size": 16,
    "intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 3.0,
    "attention_bias": True,
    "moe_layer_freq": 1,
    "n_group": 2,
    "topk_group": 1,
}
_QWEN = _GQA | {
    "num_experts": 8,
    "moe_intermediate_size": 16,
    "intermediate_size": 24,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1],
    "attention_bias": True,
    "norm_topk_prob": True,
    "use_sliding_window": True,
    "sliding_window": 20,
}
# name: (family, values that differ from its defaults). Keys are found by reading these.
CONFIGS: dict[str, tuple[str, Values]] = {
    "qwen3_moe": ("qwen3_moe", _QWEN),
    "qwen3_moe-linear": ("qwen3_moe", _QWEN | {"rope_scaling": {"type": "linear", "factor": 3.0}}),
    "qwen3_moe-default": ("qwen3_moe", _QWEN | {"rope_scaling": {"rope_type": "default"}}),
    "olmoe": (
        "olmoe",
        _GQA
        | {
            "head_dim": 2,  # hidden / heads: transformers' OLMoE norms take no other
            "num_experts": 8,
            "intermediate_size": 24,
            "attention_bias": True,
            "norm_topk_prob": True,
            "clip_qkv": 0.5,
        },
    ),
    "mixtral": (
        "mixtral",
        _GQA | {"num_local_experts": 4, "intermediate_size": 24, "sliding_window": 20},
    ),
    "mixtral-default": (
        "mixtral",
        _GQA
        | {
            "rope_scaling": {"rope_type": "default"},
            "num_local_experts": 4,
            "intermediate_size": 24,
            "sliding_window": 20,
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        _MLA
        | {
            "topk_method": "group_limited_greedy",
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "mlp_bias": False,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        _MLA
        | {
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": False,
            "rope_interleave": False,
        },
    ),
}

# Sizes of the model: transformers takes those of the family's first model where they are absent.
REQUIRED = {
    *("vocab_size", "hidden_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers"),
    *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
    *("intermediate_size", "moe_intermediate_size"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
}
# (configurations, key, how) that transformers refuses, or fails at, and we take: what it means here.
TAKEN = {
    ("qwen3_moe*", "head_dim", NULL): "hidden / heads, as in mixtral",
    ("olmoe", "head_dim", NULL): "hidden / heads, as in mixtral",
    ("mixtral", "head_dim", ABSENT): "hidden / heads: with yarn too",
    ("mixtral", "head_dim", NULL): "hidden / heads: with yarn too",
    ("qwen3_moe*", "num_key_value_heads", NULL): "as many as heads, as in olmoe and in transformers 4",
    ("mixtral*", "num_key_value_heads", NULL): "as many as heads, as in olmoe and in transformers 4",
    ("*", "rope_scaling.partial_rotary_factor", NULL): "1: with yarn as with default rope",
    ("[!q]*", "rope_scaling.factor", ABSENT): "of yarn: as null",
    ("qwen3_moe", "rope_scaling.factor", ABSENT): "of yarn: as null",
    ("deepseek_v?", "rope_scaling.factor", NULL): "as in other families",
}


class Recorded(dict[str, Any]):
    """Values that remember which keys were asked for, nested ones with the table's name and a dot."""

    def __init__(self, values: Values, asked: set[str], prefix: str = "") -> None:
        nested = {
            key: Recorded(value, asked, f"{key}.") if isinstance(value, dict) else value
            for key, value in values.items()
        }
        super().__init__(nested)
        self._asked, self._prefix = asked, prefix

    def __contains__(self, key: object) -> bool:
        self._asked.add(f"{self._prefix}{key}")
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._asked.add(self._prefix + key)
        return super().get(key, default)


def keys_read(family: str, values: Values) -> list[str]:
    asked: set[str] = set()
    FAMILIES[family](Fields(Recorded(values, asked), "config.json"))
    return sorted(key for key in asked if has(values, key))


def has(values: Values, key: str) -> bool:
    table, _, name = key.rpartition(".")
    return name in (values[table] if table else values)


def changed(values: Values, key: str, how: str) -> Values:
    new = copy.deepcopy(values)
    table, _, name = key.rpartition(".")
    where = new[table] if table else new
    if how == ABSENT:
        del where[name]
    else:
        where[name] = None
    return new


def cases() -> Iterator[Any]:
    for config, (family, values) in CONFIGS.items():
        for key in keys_read(family, values):
            for how in (ABSENT, NULL):
                yield pytest.param(config, key, how, id=f"{config}-{key}-{how}")


def ours(family: str, values: Values) -> Values | str:
    try:
        spec = FAMILIES[family](Fields(values, "config.json"))
    except CheckpointError:
        return REFUSED
    a, router = spec.attention, spec.router
    return {
        "act": "silu",
        "norm_eps": spec.norm_eps,
        "tied": spec.tied_head,
        "dtype": spec.dtype,
        "bos": spec.bos_token_id,
        "eos": spec.eos_token_ids,
        "scale": pytest.approx(a.scale),
        "bias": a.bias,
        "attention": (a.heads, a.kv_heads, a.head_dim, a.window, a.clip)
        if isinstance(a, GqaSpec)
        else (a.heads, a.q_lora, a.kv_lora, a.nope_dim, a.rope_dim, a.v_dim),
        "rope": (frequencies(spec.rope).tolist(), pytest.approx(spec.rope.attention_factor)),
        "interleaved": spec.rope.interleaved,
        "router": (router.num_experts, router.top_k, router.renormalise, router.scale),
        "groups": (router.groups, router.top_groups),
        "sparse": spec.sparse_layers,
        "ffn": ffn_widths(spec),
    }


def ffn_widths(spec: ModelSpec) -> tuple[int, int, int]:
    return spec.expert_ffn, 0 if all(spec.sparse_layers) else spec.dense_ffn, spec.shared_ffn


def theirs(family: str, values: Values) -> Values | str:
    """Of a model that runs."""
    import transformers

    config_class = getattr(transformers, f"{CLASSES[family]}Config")
    model_class = getattr(transformers, f"{CLASSES[family]}ForCausalLM")
    try:
        config = config_class.from_dict(copy.deepcopy(values))
        model = model_class(config).eval()
        with torch.inference_mode():
            model(torch.tensor([[1, 2, 3]]))
    except (StrictDataclassError, KeyError, TypeError, RuntimeError, UnboundLocalError):
        return REFUSED
    decoder, attention = model.model, model.model.layers[0].self_attn
    sparse = [layer.mlp for layer in decoder.layers if hasattr(layer.mlp, "experts")]
    dense = [layer.mlp for layer in decoder.layers if not hasattr(layer.mlp, "experts")]
    block, eos = sparse[0], config.eos_token_id
    shared = getattr(block, "shared_experts", None)
    return {
        "act": config.hidden_act,
        "norm_eps": decoder.norm.variance_epsilon,
        "tied": config.tie_word_embeddings,
        "dtype": None if config.dtype is None else str(config.dtype).removeprefix("torch."),
        "bos": config.bos_token_id,
        "eos": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        "scale": attention.scaling,
        "bias": attention.o_proj.bias is not None,
        "attention": (mla if "deepseek" in family else gqa)(config, attention),
        "rope": (decoder.rotary_emb.inv_freq.tolist(), decoder.rotary_emb.attention_scaling),
        "interleaved": family == "deepseek_v2" or bool(getattr(config, "rope_interleave", False)),
        "router": (
            block.gate.weight.shape[0],
            block.gate.top_k,
            family == "mixtral" or (family != "deepseek_v2" and bool(block.gate.norm_topk_prob)),
            getattr(block.gate, "routed_scaling_factor", 1.0),
        ),
        "groups": groups(config),
        "sparse": tuple(hasattr(layer.mlp, "experts") for layer in decoder.layers),
        "ffn": (
            block.experts.down_proj.shape[-1],
            dense[0].down_proj.weight.shape[-1] if dense else 0,
            0 if shared is None else shared.down_proj.weight.shape[-1],
        ),
    }


def gqa(config: Any, attention: Any) -> tuple[Any, ...]:
    dim = attention.head_dim
    kv_heads = attention.k_proj.weight.shape[0] // dim
    window = config.sliding_window if config.model_type != "olmoe" else None
    clip = config.clip_qkv if config.model_type == "olmoe" else None
    return attention.q_proj.weight.shape[0] // dim, kv_heads, dim, window or 0, clip or 0.0


def mla(config: Any, attention: Any) -> tuple[Any, ...]:
    q_lora = 0 if attention.q_lora_rank is None else attention.q_a_proj.weight.shape[0]
    dims = (attention.kv_lora_rank, attention.qk_nope_head_dim, attention.qk_rope_head_dim)
    return attention.num_heads, q_lora, *dims, attention.v_head_dim


def groups(config: Any) -> tuple[int, int]:
    limited = config.model_type == "deepseek_v3" or (
        config.model_type == "deepseek_v2" and config.topk_method == "group_limited_greedy"
    )
    return (config.n_group, config.topk_group) if limited else (1, 1)


CLASSES = {  # what transformers' names of them begin with
    "qwen3_moe": "Qwen3Moe",
    "olmoe": "Olmoe",
    "mixtral": "Mixtral",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
}


def difference(name: str, key: str, how: str) -> tuple[str, str, str] | None:
    """The entry of TAKEN."""
    return next((one for one in TAKEN if fnmatchcase(name, one[0]) and one[1:] == (key, how)), None)


@pytest.mark.parametrize("name", CONFIGS)
def test_all_keys_given(name: str) -> None:
    family, values = CONFIGS[name]
    assert ours(family, values) == theirs(family, values)


@pytest.mark.parametrize(("name", "key", "how"), list(cases()))
def test_a_key_left_out_or_null(name: str, key: str, how: str) -> None:
    family, values = CONFIGS[name]
    given = changed(values, key, how)
    if key in REQUIRED and how == ABSENT:
        with pytest.raises(CheckpointError, match=f"{key}.* is missing"):
            FAMILIES[family](Fields(given, "config.json"))
        return
    mine, expected = ours(family, given), theirs(family, given)
    if difference(name, key, how) is not None:
        assert (mine == REFUSED, expected) == (False, REFUSED), "no such difference: take it off the list"
    else:
        assert mine == expected


def test_every_family_is_compared() -> None:
    assert {family for family, _ in CONFIGS.values()} == set(FAMILIES) == set(CLASSES)


def test_every_difference_is_met() -> None:
    assert {difference(*case.values) for case in cases()} - {None} == set(TAKEN)


def test_fp8_blocks_have_the_size_transformers_assumes() -> None:
    from transformers.utils.quantization_config import FineGrainedFP8Config

    _, values = CONFIGS["qwen3_moe"]
    table: Values = {"quant_method": "fp8"}
    spec = FAMILIES["qwen3_moe"](Fields(values | {"quantization_config": table}, "config.json"))
    assert spec.quant_block == tuple(FineGrainedFP8Config().weight_block_size)
    table["weight_block_size"] = None  # one scale of a whole tensor, which is not read
    with pytest.raises(CheckpointError, match="weight_block_size = null: must be two positive integers"):
        FAMILIES["qwen3_moe"](Fields(values | {"quantization_config": table}, "config.json"))
