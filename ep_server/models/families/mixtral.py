"""Mixtral: GQA without q/k norm, softmax router with renormalised top-k, experts named w1, w3, w2."""

from __future__ import annotations

from ep_server.models.families import common
from ep_server.models.families.fields import Fields
from ep_server.models.families.spec import ModelSpec, MoeNames, QkNorm, RouterSpec


def spec(config: Fields) -> ModelSpec:
    """Reads a `mixtral` config.json."""
    window = config.integer("sliding_window") if config.has("sliding_window") else 0
    attention = common.gqa(config, QkNorm.NONE, kv_heads=8, window=window)
    return ModelSpec(
        **common.base(config, "mixtral", norm_eps=1e-5, bos=(1,), eos=(2,)),
        attention=attention,
        rope=common.rope(config, attention.head_dim, theta=1_000_000.0),
        router=RouterSpec(
            num_experts=config.integer("num_local_experts", "num_experts"),
            top_k=config.integer("num_experts_per_tok"),
            renormalise=True,
        ),
        sparse_layers=(True,) * config.integer("num_hidden_layers"),
        expert_ffn=config.integer("intermediate_size"),
        names=MoeNames(blocks=("block_sparse_moe", "mlp"), gate="w1", up="w3", down="w2"),
    )
