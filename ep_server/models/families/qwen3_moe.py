"""Qwen3-MoE: GQA with per-head q/k norm, softmax router over all experts, optional dense layers."""

from __future__ import annotations

from ep_server.models.families import common
from ep_server.models.families.fields import Fields
from ep_server.models.families.spec import ModelSpec, QkNorm, RouterSpec


def spec(config: Fields) -> ModelSpec:
    """Reads a `qwen3_moe` config.json."""
    layers = config.integer("num_hidden_layers")
    step = config.integer("decoder_sparse_step", default=1)
    dense = config.indices("mlp_only_layers")
    window = 0
    if config.flag("use_sliding_window"):
        window = config.integer("sliding_window", default=4096, null=0, low=0)
    config.skip("sliding_window", "max_window_layers")  # a window holds in all layers, or in none
    bias = config.flag("attention_bias")
    attention = common.gqa(config, QkNorm.HEAD, kv_heads=4, bias=bias, window=window)
    return ModelSpec(
        **common.base(config, "qwen3_moe"),
        attention=attention,
        rope=common.rope(config, attention.head_dim),
        router=RouterSpec(
            num_experts=config.integer("num_experts", "num_local_experts"),
            top_k=config.integer("num_experts_per_tok"),
            renormalise=config.flag("norm_topk_prob"),
        ),
        sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        expert_ffn=config.integer("moe_intermediate_size"),
        dense_ffn=config.integer("intermediate_size"),
    )
