"""Tiny random checkpoints of every family, made by transformers, with the tokens that transformers draws.

All share H, E and K, so that one group of ranks with one exchange can run them all. A checkpoint is only
used if greedy decoding is a fair test: many different tokens, and no near tie that rounding could turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # who only runs a checkpoint needs none of it; importing it takes seconds
    import transformers

HIDDEN, EXPERTS, TOP_K, VOCAB = 64, 6, 3, 256
NEW_TOKENS = 64
MIN_DISTINCT, MIN_MARGIN = 16, 1e-3
PROMPT_LENGTHS = (5, 17, 1, 33)

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 160,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 40,
    "rope_theta": 10_000.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}


@dataclass(frozen=True)
class Case:
    """One model to make.

    family: what transformers' classes of it begin with. scale: standard deviation of random weights. save:
    options of save_pretrained.
    """

    name: str
    family: str
    options: dict[str, Any]
    scale: float = 0.2
    seed: int = 0
    save: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> type[transformers.PretrainedConfig]:
        import transformers

        made: type[transformers.PretrainedConfig] = getattr(transformers, f"{self.family}Config")
        return made

    @property
    def model(self) -> type[transformers.PreTrainedModel]:
        import transformers

        made: type[transformers.PreTrainedModel] = getattr(transformers, f"{self.family}ForCausalLM")
        return made


CASES = (
    Case(
        "qwen3_moe",
        "Qwen3Moe",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": EXPERTS,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    Case(
        "qwen3_moe-dense-layer-bias-shards",
        "Qwen3Moe",
        {
            "num_key_value_heads": 1,
            "head_dim": 32,
            "num_experts": EXPERTS,
            "moe_intermediate_size": 32,
            "intermediate_size": 80,
            "mlp_only_layers": [1],
            "num_hidden_layers": 3,
            "attention_bias": True,
            "norm_topk_prob": False,
            "use_sliding_window": True,
            "sliding_window": 24,
        },
        save={"max_shard_size": "100KB"},
        seed=2,
    ),
    Case(
        "olmoe",
        "Olmoe",
        {"num_experts": EXPERTS, "intermediate_size": 32, "num_key_value_heads": 2, "clip_qkv": 1.5},
        seed=1,
    ),
    Case(
        "mixtral",
        "Mixtral",
        {
            "num_local_experts": EXPERTS,
            "intermediate_size": 48,
            "num_key_value_heads": 2,
            "sliding_window": 40,
        },
    ),
    Case(
        "mixtral-tied-stacked",
        "Mixtral",
        {
            "num_local_experts": EXPERTS,
            "intermediate_size": 48,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
        save={"save_original_format": False},
    ),
    Case(
        "deepseek_v2-lite-yarn",
        "DeepseekV2",
        _MLA
        | {
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "topk_method": "greedy",
            "rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
        seed=1,
    ),
    Case(
        "deepseek_v2-groups",
        "DeepseekV2",
        _MLA
        | {
            "q_lora_rank": 20,
            "n_shared_experts": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
        },
    ),
    Case(
        "deepseek_v3",
        "DeepseekV3",
        _MLA
        | {
            "q_lora_rank": 20,
            "n_shared_experts": 1,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    Case(
        "deepseek_v3-moonlight",
        "DeepseekV3",
        _MLA
        | {
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.446,
            "rope_interleave": False,
        },
    ),
)

# For GPUs: heads and groups that the attention kernel for Hopper takes.
WIDE = Case(
    "qwen3_moe-wide-heads",
    "Qwen3Moe",
    {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_experts": EXPERTS,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    scale=0.4,
    seed=17,
)


@dataclass(frozen=True)
class Tiny:
    """A checkpoint directory, prompts, and what transformers answers to each in float32.

    tokens: per prompt NEW_TOKENS ids. margin: smallest top-2 gap of any logit row. distinct: fewest
    different ids of any answer.
    """

    case: Case
    path: Path
    prompts: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    margin: float
    distinct: int


def make(case: Case, path: Path) -> Tiny:
    """Builds and saves a model, trying seeds until greedy decoding is a fair test."""
    prompts = tuple(tuple((i * i * 31 + 7 * n) % VOCAB for i in range(n)) for n in PROMPT_LENGTHS)
    for seed in range(case.seed, case.seed + 200):
        model = random_model(case, seed)
        answers = []
        for prompt in prompts:
            answers.append(greedy(model, prompt))
            if answers[-1][1] <= MIN_MARGIN or len(set(answers[-1][0])) < MIN_DISTINCT:
                break
        else:
            model.save_pretrained(path, **case.save)
            tokens = tuple(ids for ids, _ in answers)
            distinct = min(len(set(ids)) for ids in tokens)
            return Tiny(case, path, prompts, tokens, min(margin for _, margin in answers), distinct)
    raise AssertionError(f"{case.name}: no seed gives a fair test at scale {case.scale}")


def random_model(case: Case, seed: int) -> transformers.PreTrainedModel:
    """A float32 model whose norms, biases and router corrections are random too."""
    torch.manual_seed(seed)
    config = case.config(**(_SHARED | case.options), initializer_range=case.scale)
    model = case.model(config).eval()
    model.generation_config.pad_token_id = None
    with torch.no_grad():
        for name, values in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                values.uniform_(0.6, 1.4)
            elif name.endswith("bias"):
                values.normal_(0, 0.1)
    return model


def greedy(model: transformers.PreTrainedModel, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
    """NEW_TOKENS ids and the smallest gap between the two best logits of any of them."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    best = torch.cat(out.logits).topk(2, dim=-1).values
    return tuple(out.sequences[0, len(prompt) :].tolist()), float((best[:, 0] - best[:, 1]).min())
