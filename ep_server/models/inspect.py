"""What a checkpoint holds, or would hold. Reads headers only, or config.json alone; needs no torch.

Units: parameters, bytes, tokens.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ep_server.models.checkpoint import Checkpoint
from ep_server.models.contents import Unused, unused_tensors
from ep_server.models.families import ModelSpec, read_spec, unread_keys
from ep_server.models.families.spec import EMBEDDING, HEAD, GqaSpec, QkNorm
from ep_server.models.footprint import footprint
from ep_server.models.sizes import Dtype, cache_dtype, kv_block_bytes, serving_dtype

# Scales of FP8 weights and FP8 caches, and what follows from config.json.
_NO_PARAMETERS = ("_scale_inv", ".k_scale", ".v_scale", ".inv_freq")

_OUTER = {EMBEDDING: "embedding", HEAD: "head", "model.norm.weight": "norms"}

# Of the tensors of layers; first match wins.
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

    parameters: by part, as served. unserved: parameters in the files that are not. unused: what is in the
      files and not read. dtype: served. kv_dtype: of the KV cache.
    """

    spec: ModelSpec
    dtype: Dtype
    shards: tuple[Path, ...]
    file_bytes: int
    parameters: dict[str, int]
    unserved: int
    unused: Unused
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

    Raises: CheckpointError, also for tensors that the model should use and config.json leaves out.
    """
    spec, checkpoint = read_spec(path), Checkpoint.open(path)
    unused = unused_tensors(spec, str(Path(path) / "config.json"), checkpoint.tensors)
    idle, parts = frozenset(unused), Counter[str]()
    for tensor in checkpoint.tensors.values():
        if not tensor.name.endswith(_NO_PARAMETERS):
            parts["unserved" if tensor.name in idle else _part(tensor.name, spec)] += tensor.size
    unserved = parts.pop("unserved", 0)
    served = serving_dtype(spec, dtype)
    return Inspection(
        spec,
        served,
        checkpoint.shards,
        sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        dict(parts),
        unserved,
        Unused(unused, unread_keys(path)),
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
    unused = Unused(keys=unread_keys(path))
    return Inspection(spec, served, (), 0, parts, 0, unused, cache_dtype(served, kv_dtype))


def _part(name: str, spec: ModelSpec) -> str:
    """Of the model, for a tensor that it reads."""
    if name in _OUTER:
        return _OUTER[EMBEDDING if spec.tied_head and name == HEAD else name]
    return next(part for part, pattern in _PARTS if pattern.search(name))
