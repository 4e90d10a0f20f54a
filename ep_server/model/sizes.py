"""What a model takes as it is served: dtype, context, KV cache. Plain arithmetic; needs no torch.

Units: tokens, bytes.
"""

from __future__ import annotations

from enum import StrEnum

from ep_server.errors import ConfigError
from ep_server.model.families.spec import ModelSpec


class Dtype(StrEnum):
    """What weights, activations and KV cache are kept in; the value is torch's name of it."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is Dtype.FLOAT32 else 2


def serving_dtype(spec: ModelSpec, choice: str) -> Dtype:
    """ModelConfig.dtype resolved: "auto" is the checkpoint's own, float32 for float16."""
    name = spec.dtype if choice == "auto" else choice
    return Dtype.BFLOAT16 if name == Dtype.BFLOAT16 else Dtype.FLOAT32


def context_limit(spec: ModelSpec, max_context: int) -> int:
    """ModelConfig.max_context resolved, tokens. Raises: ConfigError above the model's own limit."""
    if max_context > spec.max_context:
        raise ConfigError("model.max_context", max_context, f"at most the model's {spec.max_context}")
    return max_context or spec.max_context


def kv_block_bytes(spec: ModelSpec, block_size: int, dtype: Dtype) -> int:
    """Memory of one block of `block_size` tokens over all layers, bytes."""
    return spec.kv_values_per_token * block_size * dtype.itemsize
