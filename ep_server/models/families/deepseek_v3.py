"""DeepSeek-V3, R1, Moonlight, Kimi-K2: MLA, sigmoid router with correction bias and group limits."""

from __future__ import annotations

from ep_server.models.families import common
from ep_server.models.families.deepseek_v2 import blocks, groups, mla
from ep_server.models.families.fields import Fields
from ep_server.models.families.spec import GroupScore, ModelSpec, RouterSpec, Score


def spec(config: Fields) -> ModelSpec:
    """Reads a `deepseek_v3` config.json. Multi-token-prediction layers of the file are not used."""
    config.choice("scoring_func", default="sigmoid", null="sigmoid", allowed=("sigmoid",))
    config.choice("topk_method", default="noaux_tc", null="noaux_tc", allowed=("noaux_tc",))
    return ModelSpec(
        **common.base(config, "deepseek_v3", bos=(0,), eos=(1,)),
        **mla(config, interleaved=config.flag("rope_interleave", default=True, null=False)),
        **blocks(config, dense=3, shared=1),
        router=RouterSpec(
            num_experts=config.integer("n_routed_experts", "num_local_experts", "num_experts"),
            top_k=config.integer("num_experts_per_tok"),
            score=Score.SIGMOID,
            bias=True,
            group_score=GroupScore.TOP2_SUM,
            renormalise=config.flag("norm_topk_prob", default=True, null=False),
            renorm_eps=1e-20,
            scale=config.number("routed_scaling_factor", default=2.5),
            **groups(config, count=8, best=4, least=2),
        ),
    )
