"""Parts of a ModelSpec that several families read the same way from config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ep_server.errors import CheckpointError
from ep_server.models.families.fields import Fields
from ep_server.models.families.spec import GqaSpec, QkNorm, RopeSpec, RopeType

_DTYPE = ("dtype", "torch_dtype")
_DTYPES = ("float32", "bfloat16", "float16")
_METHODS = (
    "fp8 (E4M3 weights with a scale for each block); bitsandbytes, GPTQ, AWQ and other methods are not read: "
    "serve the checkpoint from which this one was quantized"
)


def base(
    config: Fields, family: str, *, norm_eps: float = 1e-6, bos: Sequence[int] = (), eos: Sequence[int] = ()
) -> dict[str, Any]:
    """Fields of ModelSpec that every family spells alike. norm_eps, bos, eos: the family's defaults."""
    config.choice("hidden_act", default="silu", allowed=("silu", "swish"))
    return {
        "family": family,
        "vocab_size": config.integer("vocab_size"),
        "hidden": config.integer("hidden_size"),
        "max_context": config.integer("max_position_embeddings"),
        "norm_eps": config.number("rms_norm_eps", default=norm_eps, above=0.0),
        "tied_head": config.flag("tie_word_embeddings"),
        "dtype": config.choice(*_DTYPE, allowed=_DTYPES) if config.has(*_DTYPE) else None,
        "quant_block": _quant_block(config.table("quantization_config")),
        "bos_token_id": next(iter(config.token_ids("bos_token_id", default=bos)), None),
        "eos_token_ids": config.token_ids("eos_token_id", default=eos),
    }


def gqa(
    config: Fields,
    qk_norm: QkNorm,
    *,
    kv_heads: int = 0,
    bias: bool = False,
    window: int = 0,
    clip: float = 0.0,
) -> GqaSpec:
    """Grouped-query attention; an absent head_dim is hidden / heads.

    Args:
        kv_heads: the family's default; 0 = as many as heads.
    """
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", default=kv_heads or heads, null=heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    if not config.has("head_dim") and hidden % heads:
        raise config.error("num_attention_heads", heads, f"a divisor of hidden_size ({hidden})")
    head_dim = config.integer("head_dim", default=hidden // heads, null=hidden // heads)
    if head_dim % 2:
        raise config.error("head_dim", head_dim, "even")
    return GqaSpec(
        heads, kv_heads, head_dim, head_dim**-0.5, qk_norm=qk_norm, bias=bias, window=window, clip=clip
    )


def rope(config: Fields, dim: int, *, theta: float = 10_000.0, interleaved: bool = False) -> RopeSpec:
    """Rotary embedding from rope_table().

    Args:
        dim: rotated channels. theta: the family's default base.
    """
    table = rope_table(config)
    given = table if "rope_theta" in table.values else config
    theta = given.number("rope_theta", default=theta, above=1.0)  # YaRN divides by its logarithm
    config.skip("rope_theta")  # the table's outweighs it
    whole = config.number("partial_rotary_factor", default=1.0, null=1.0)
    partial = table.number("partial_rotary_factor", default=whole, null=whole)
    if partial != 1.0:
        raise config.error("partial_rotary_factor", partial, "1")
    kind = RopeType(
        table.choice("rope_type", "type", default="default", allowed=tuple(t.value for t in RopeType))
    )
    if kind is RopeType.DEFAULT:
        return RopeSpec(dim, theta, interleaved)
    if kind is RopeType.LINEAR:
        return RopeSpec(dim, theta, interleaved, kind, factor=table.number("factor", above=0.0))
    context = config.integer("max_position_embeddings")
    original = table.integer("original_max_position_embeddings", default=context)
    original = config.integer("original_max_position_embeddings", default=original)  # outweighs the table
    factor = table.number("factor", default=context / original, null=context / original, above=0.0)
    attention_factor = _yarn_attention_factor(table, factor)
    return RopeSpec(
        dim,
        theta,
        interleaved,
        kind,
        factor=factor,
        original_context=original,
        beta_fast=table.number("beta_fast", default=32.0, null=32.0, above=0.0),
        beta_slow=table.number("beta_slow", default=1.0, null=1.0, above=0.0),
        attention_factor=table.number("attention_factor", default=attention_factor, null=attention_factor),
        truncate=table.flag("truncate", default=True, null=False),
    )


def rope_table(config: Fields) -> Fields:
    """The table that transformers uses: `rope_scaling`, if it says anything, replaces `rope_parameters`.

    It replaces all of it: a `rope_theta` of `rope_parameters` does not count then.
    """
    scaling = config.table("rope_scaling")
    table = scaling if scaling.values else config.table("rope_parameters")
    return _same_for_all_layers(config, table)


def _same_for_all_layers(config: Fields, table: Fields) -> Fields:
    """The one that stands below each layer type in use, where a table is nested."""
    nested = {name: value for name, value in table.values.items() if isinstance(value, Mapping)}
    if not nested:
        return table
    first, *others = config.words("layer_types") or nested
    if any(name not in nested or nested[name] != nested[first] for name in (first, *others)):
        raise CheckpointError(
            f"{table.source}: {', '.join(nested)}: must be the same for all layer types in use"
        )
    for other in {*others} - {first}:
        table.table(other).skip(*nested[other])  # says what the first one says
    return table.table(first)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's magnitude correction for a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_attention_factor(table: Fields, factor: float) -> float:
    mscale, all_dim = table.number("mscale", default=0.0, null=0.0), mscale_all_dim(table)
    if mscale and all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor)


def mscale_all_dim(table: Fields) -> float:
    """YaRN's correction of attention scores; 0 = none."""
    return table.number("mscale_all_dim", default=0.0, null=0.0)


def _quant_block(quant: Fields) -> tuple[int, int] | None:
    if not quant.values:
        return None
    by_bitsandbytes = any(quant.values.get(key) for key in ("load_in_4bit", "load_in_8bit"))
    unnamed = "bitsandbytes" if by_bitsandbytes else ""  # its first versions wrote no method
    method = quant.value("quant_method", default=unnamed, null=unnamed)
    if method != "fp8":
        raise quant.error("quant_method", method or None, _METHODS)
    block = quant.value("weight_block_size", default=[128, 128])
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block)):
        raise quant.error("weight_block_size", block, "two positive integers")
    return block[0], block[1]
