"""Sizes of a model as it is served: dtype, context, KV cache. Needs no torch. Units: tokens, bytes."""

from __future__ import annotations

from enum import StrEnum

from ep_server.errors import ConfigError
from ep_server.models.families.spec import ModelSpec


class Dtype(StrEnum):
    """What weights, activations and KV cache are kept in; the value is torch's name of it."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FP8 = "float8_e4m3fn"  # of a KV cache only

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return {Dtype.FLOAT32: 4, Dtype.BFLOAT16: 2, Dtype.FP8: 1}[self]


def serving_dtype(spec: ModelSpec, choice: str) -> Dtype:
    """ModelConfig.dtype resolved: "auto" is the checkpoint's own, float32 for float16 and for none."""
    name = spec.dtype if choice == "auto" else choice
    return Dtype.BFLOAT16 if name == Dtype.BFLOAT16 else Dtype.FLOAT32


def cache_dtype(dtype: Dtype, choice: str) -> Dtype:
    """ModelConfig.kv_dtype resolved: "auto" is the dtype that is served."""
    return Dtype.FP8 if choice == "fp8_e4m3" else dtype


def context_limit(spec: ModelSpec, max_context: int) -> int:
    """ModelConfig.max_context resolved, tokens. Raises: ConfigError above the model's own limit."""
    if max_context > spec.max_context:
        raise ConfigError("model.max_context", max_context, f"at most the model's {spec.max_context}")
    return max_context or spec.max_context


def kv_block_bytes(spec: ModelSpec, block_size: int, kv_dtype: Dtype) -> int:
    """Memory of one block of `block_size` tokens over all layers, bytes. kv_dtype: see cache_dtype."""
    return spec.kv_values_per_token * block_size * kv_dtype.itemsize
