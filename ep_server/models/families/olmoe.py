"""OLMoE: attention with q/k norm over the full width, softmax router, weights not renormalised."""

from __future__ import annotations

from ep_server.models.families import common
from ep_server.models.families.fields import Fields
from ep_server.models.families.spec import ModelSpec, QkNorm, RouterSpec


def spec(config: Fields) -> ModelSpec:
    """Reads an `olmoe` config.json."""
    clip = config.number("clip_qkv", above=0.0) if config.has("clip_qkv") else 0.0
    attention = common.gqa(config, QkNorm.FULL, bias=config.flag("attention_bias"), clip=clip)
    return ModelSpec(
        **common.base(config, "olmoe", norm_eps=1e-5, eos=(50279,)),
        attention=attention,
        rope=common.rope(config, attention.head_dim),
        router=RouterSpec(
            num_experts=config.integer("num_experts", "num_local_experts"),
            top_k=config.integer("num_experts_per_tok"),
            renormalise=config.flag("norm_topk_prob"),
        ),
        sparse_layers=(True,) * config.integer("num_hidden_layers"),
        expert_ffn=config.integer("intermediate_size"),
    )
