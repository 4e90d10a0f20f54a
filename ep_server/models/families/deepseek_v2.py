"""DeepSeek-V2: MLA, softmax router (greedy or limited to groups), shared experts, leading dense layers."""

from __future__ import annotations

from typing import Any

from ep_server.models.families import common
from ep_server.models.families.fields import Fields
from ep_server.models.families.spec import GroupScore, MlaSpec, ModelSpec, RopeType, RouterSpec


def spec(config: Fields) -> ModelSpec:
    """Reads a `deepseek_v2` config.json."""
    if config.flag("norm_topk_prob", null=False):
        raise config.error("norm_topk_prob", True, "false for deepseek_v2")
    if config.flag("mlp_bias"):
        raise config.error("mlp_bias", True, "false")
    config.choice("scoring_func", default="softmax", null="softmax", allowed=("softmax",))
    method = config.choice("topk_method", default="greedy", allowed=("greedy", "group_limited_greedy"))
    limits = groups(config) if method == "group_limited_greedy" else {}
    config.skip("n_group", "topk_group")  # without that method they limit nothing
    return ModelSpec(
        **common.base(config, "deepseek_v2", bos=(1,), eos=(2,)),
        **mla(config, interleaved=True),
        **blocks(config, dense=0, shared=2),
        router=RouterSpec(
            num_experts=config.integer("n_routed_experts", "num_experts", "num_local_experts"),
            top_k=config.integer("num_experts_per_tok"),
            group_score=GroupScore.MAX,
            scale=config.number("routed_scaling_factor", default=1.0),
            **limits,
        ),
    )


def mla(config: Fields, *, interleaved: bool) -> dict[str, Any]:
    """`attention` and `rope` of a model with latent attention."""
    rope_dim, nope_dim = config.integer("qk_rope_head_dim"), config.integer("qk_nope_head_dim")
    if rope_dim % 2:
        raise config.error("qk_rope_head_dim", rope_dim, "even")
    rope = common.rope(config, rope_dim, interleaved=interleaved)
    config.skip("num_key_value_heads", "head_dim", "qk_head_dim")  # they follow from the other sizes
    scale = (nope_dim + rope_dim) ** -0.5
    if rope.type is not RopeType.DEFAULT:
        all_dim = common.mscale_all_dim(common.rope_table(config))
        scale *= common.yarn_mscale(rope.factor, all_dim) ** 2 if all_dim else 1.0
    attention = MlaSpec(
        heads=config.integer("num_attention_heads"),
        q_lora=config.integer("q_lora_rank", default=1536, null=0, low=0),
        kv_lora=config.integer("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=config.integer("v_head_dim"),
        scale=scale,
        bias=config.flag("attention_bias"),
    )
    return {"attention": attention, "rope": rope}


def blocks(config: Fields, *, dense: int, shared: int) -> dict[str, Any]:
    """Which layers are sparse, and the FFN widths. dense, shared: the family's defaults."""
    layers = config.integer("num_hidden_layers")
    dense = config.integer("first_k_dense_replace", default=dense, low=0)
    step = config.integer("moe_layer_freq", default=1, null=1)
    if step != 1:
        raise config.error("moe_layer_freq", step, "1")
    ffn = config.integer("moe_intermediate_size")
    shared = config.integer("n_shared_experts", default=shared, low=0)
    return {
        "sparse_layers": tuple(i >= dense for i in range(layers)),
        "expert_ffn": ffn,
        "shared_ffn": ffn * shared,
        "dense_ffn": config.integer("intermediate_size"),
    }


def groups(
    config: Fields, *, count: int | None = None, best: int | None = None, least: int = 1
) -> dict[str, Any]:
    """Group limits of the router, checked against the number of experts.

    Args:
        count, best: the family's defaults. least: experts that rank a group.
    """
    experts = config.integer("n_routed_experts", "num_experts", "num_local_experts")
    count, best = config.integer("n_group", default=count), config.integer("topk_group", default=best)
    if experts % count:
        raise config.error("n_group", count, f"a divisor of the number of experts ({experts})")
    if count > 1 and experts // count < least:
        allowed = (
            f"at most {experts // least}: the {least} best of a group's experts rank it ({experts} in all)"
        )
        raise config.error("n_group", count, allowed)
    top_k = config.integer("num_experts_per_tok")
    if not best <= count or best * (experts // count) < top_k:
        raise config.error("topk_group", best, f"at most n_group ({count}) and enough for top-{top_k}")
    return {"groups": count, "top_groups": best}
