"""What a checkpoint holds, or would hold. Reads headers only, or config.json alone; needs no torch.

Units: parameters, bytes, tokens.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ep_server.model.checkpoint import Checkpoint, StoredTensor
from ep_server.model.families import ModelSpec, read_spec
from ep_server.model.families.spec import EMBEDDING, HEAD, GqaSpec, QkNorm
from ep_server.model.footprint import footprint
from ep_server.model.sizes import Dtype, cache_dtype, kv_block_bytes, serving_dtype

_SCALES = ("_scale_inv", ".k_scale", ".v_scale")  # of FP8 weights and FP8 caches: no parameters
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")

_OUTER = {EMBEDDING: "embedding", "model.norm.weight": "norms"}

# First match wins; the part of a tensor below its layer.
_PARTS = (
    ("experts", re.compile(r"\.experts\.")),
    ("shared experts", re.compile(r"\.shared_experts\.")),
    ("attention", re.compile(r"self_attn\.")),
    ("norms", re.compile(r"layernorm")),
    ("router", re.compile(r"\.gate\.")),
    ("dense FFN", re.compile(r"mlp\.")),
)


@dataclass(frozen=True, slots=True)
class Inspection:
    """One checkpoint.

    parameters: by part, as served. unused: parameters in the files that are not (multi-token prediction).
    dtype: served. kv_dtype: of the KV cache.
    """

    spec: ModelSpec
    dtype: Dtype
    shards: tuple[Path, ...]
    file_bytes: int
    parameters: dict[str, int]
    unused: int
    kv_dtype: Dtype

    @property
    def total_parameters(self) -> int:
        """All parameters that are served."""
        return sum(self.parameters.values())

    @property
    def active_parameters(self) -> int:
        """Parameters one token passes: of the routed experts only its top-k."""
        router = self.spec.router
        experts = self.parameters.get("experts", 0)
        return self.total_parameters - experts + experts * router.top_k // router.num_experts

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache of one token on the rank that owns its sequence, bytes."""
        return kv_block_bytes(self.spec, 1, self.kv_dtype)


def inspect_checkpoint(path: str | Path, dtype: str = "auto", kv_dtype: str = "auto") -> Inspection:
    """Reads config.json and the headers of all shards. dtype, kv_dtype: as in ModelConfig.

    Raises: CheckpointError.
    """
    spec, checkpoint = read_spec(path), Checkpoint.open(path)
    parts: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        if not tensor.name.endswith(_SCALES):
            parts[_part(tensor, spec)] += tensor.size
    unused = parts.pop("unused", 0)
    served = serving_dtype(spec, dtype)
    return Inspection(
        spec,
        served,
        checkpoint.shards,
        sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        dict(parts),
        unused,
        cache_dtype(served, kv_dtype),
    )


def inspect_config(path: str | Path, dtype: str = "auto", kv_dtype: str = "auto") -> Inspection:
    """As inspect_checkpoint, of a directory that need hold no weights. Raises: CheckpointError."""
    spec = read_spec(path)
    plain = footprint(
        spec, Dtype.FLOAT32, packed=False
    )  # the router is float32 in any case: one size for all
    parts = {name: number // Dtype.FLOAT32.itemsize for name, number in plain.replicated.items()}
    of_expert = plain.expert // Dtype.FLOAT32.itemsize
    parts["experts"] = of_expert * plain.sparse_layers * spec.router.num_experts
    attention = spec.attention
    if isinstance(attention, GqaSpec) and attention.qk_norm is QkNorm.HEAD:
        # Kept once per head, but stored once.
        repeated = (attention.heads + attention.kv_heads - 2) * attention.head_dim
        parts["attention"] -= spec.num_layers * repeated
    served = serving_dtype(spec, dtype)
    return Inspection(spec, served, (), 0, parts, 0, cache_dtype(served, kv_dtype))


def _part(tensor: StoredTensor, spec: ModelSpec) -> str:
    match = _LAYER.fullmatch(tensor.name)
    if match is None:
        if tensor.name == HEAD:
            return "embedding" if spec.tied_head else "head"
        return _OUTER.get(tensor.name, "unused")
    if int(match[1]) >= spec.num_layers:
        return "unused"
    return next((part for part, pattern in _PARTS if pattern.search(match[2])), "unused")
