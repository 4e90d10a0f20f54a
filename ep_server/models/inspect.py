"""What a checkpoint holds, or would hold, and which of its tensors the model reads.

Reads headers or config.json only; needs no torch. Follows weights.py tensor by tensor. A tensor that another
value of a field would use is an error: config.json then describes another model than the one stored.
Units: parameters, bytes, tokens.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ep_server.errors import CheckpointError
from ep_server.models.checkpoint import Checkpoint
from ep_server.models.families import ModelSpec, read_spec, unread_keys
from ep_server.models.families.spec import EMBEDDING, HEAD, GqaSpec, MlaSpec, QkNorm
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


FP8_SCALE = "_scale_inv"
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_EXPERT = re.compile(r"\.experts\.\d{1,9}\.")
_KV_SCALE = re.compile(r"model\.layers\.\d+\.self_attn\.(attn\.|k_proj\.|v_proj\.)?[kv]_scale")
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # from rope_theta, by old tools
_MTP = re.compile(r"(model\.layers\.\d{1,9}\.)eh_proj\.weight")  # every multi-token-prediction layer has one

_EXPERTS_FIELD = {
    "mixtral": "num_local_experts",
    "deepseek_v2": "n_routed_experts",
    "deepseek_v3": "n_routed_experts",
}
_SPARSE_FIELD = {
    "qwen3_moe": "mlp_only_layers or decoder_sparse_step",
    "deepseek_v2": "first_k_dense_replace",
    "deepseek_v3": "first_k_dense_replace",
}
# How names of quantised tensors end. These methods are not served.
_QUANTISERS = {
    ".SCB": "bitsandbytes",
    ".absmax": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    "_blocks": "MXFP4",
}


class _Field(NamedTuple):
    """What config.json says, and the model if it said otherwise."""

    says: str
    otherwise: ModelSpec


@dataclass(frozen=True, slots=True)
class Unused:
    """What a checkpoint holds and nobody reads. tensors: names. keys: of config.json, dotted where nested."""

    tensors: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        """A sentence; empty if there is nothing."""
        parts = []
        if self.tensors:
            parts.append(f"tensors of the checkpoint that are not used ({_few(self.tensors)})")
        if self.keys:
            parts.append(f"keys of config.json that are not read ({_few(self.keys)})")
        return "there are " + " and ".join(parts) if parts else ""


def unused_tensors(spec: ModelSpec, source: str, names: Collection[str]) -> tuple[str, ...]:
    """The tensors that the model does not read, sorted.

    Args:
        source: config.json, for messages. names: of all tensors of the checkpoint.
    Raises: CheckpointError for one that the model should have read, with the field that keeps it from that.
    """
    read = set(_read(spec, names))
    left = sorted(name for name in names if not _is_read(spec, read, name))
    predicts = tuple({match[1] for name in left if (match := _MTP.fullmatch(name))})
    suspects = [name for name in left if spec.family != "deepseek_v3" or not name.startswith(predicts)]
    if suspects:
        _check(spec, source, names, suspects, read)
    return tuple(left)


def _is_read(spec: ModelSpec, read: set[str], name: str) -> bool:
    if spec.quant_block and name.endswith(FP8_SCALE):
        name = name.removesuffix(FP8_SCALE)
    return name in read or bool(_KV_SCALE.fullmatch(name) or _DERIVED.fullmatch(name))


def _check(spec: ModelSpec, source: str, names: Collection[str], left: list[str], read: set[str]) -> None:
    """left: those of `names` that are not in `read`. Raises: see unused_tensors()."""
    layers = spec.num_layers
    beyond = [name for name in left if (match := _LAYER.match(name)) and int(match[1]) >= layers]
    _refuse(source, f"num_hidden_layers = {layers}", beyond)
    experts = [name for name in left if _EXPERT.sub(".experts.0.", name) in read]
    field = _EXPERTS_FIELD.get(spec.family, "num_experts")
    _refuse(source, f"{field} = {spec.router.num_experts}", experts)
    for says, otherwise in _fields(spec):
        wanted = set(_read(otherwise, names))
        _refuse(source, says, [name for name in left if name in wanted])
    for name in left if spec.quant_block is None else ():
        method = next((_QUANTISERS[end] for end in _QUANTISERS if name.endswith(end)), None)
        if method and name.startswith("model.layers."):
            raise CheckpointError(
                f"{source}: there is no quantization_config, but tensor {name} is one of {method}: "
                "weights must be F32, BF16, F16, or FP8 with quantization_config.quant_method = fp8"
            )


def _refuse(source: str, says: str, names: list[str]) -> None:
    if names:
        raise CheckpointError(
            f"{source}: {says}, but the checkpoint has tensors that the model would then not use "
            f"({_few(names)}): correct config.json, or remove the tensors"
        )


def _fields(spec: ModelSpec) -> Iterator[_Field]:
    """Of all fields that switch tensors on or off."""
    a = spec.attention
    if not a.bias and spec.family != "mixtral":
        yield _Field("attention_bias is false", replace(spec, attention=replace(a, bias=True)))
    if isinstance(a, MlaSpec):
        other = replace(spec, attention=replace(a, q_lora=0 if a.q_lora else 1))
        yield _Field(f"q_lora_rank = {a.q_lora or None}", other)
        if not spec.shared_ffn:
            yield _Field("n_shared_experts = 0", replace(spec, shared_ffn=1))
    if spec.family in _SPARSE_FIELD:
        for sparse in (True, False):
            says = f"{_SPARSE_FIELD[spec.family]} makes the layer {'dense' if sparse else 'sparse'}"
            yield _Field(says, replace(spec, sparse_layers=(sparse,) * spec.num_layers))


def _read(spec: ModelSpec, names: Collection[str]) -> Iterator[str]:
    """All that the loader reads. names: of the checkpoint, which say how experts are stored."""
    yield "model.norm.weight"
    if spec.tied_head:  # the file holds either
        yield EMBEDDING if EMBEDDING in names else HEAD
    else:
        yield from (EMBEDDING, HEAD)
    for index, sparse in enumerate(spec.sparse_layers):
        layer = f"model.layers.{index}"
        yield from (f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight")
        attention = _gqa(spec.attention) if isinstance(spec.attention, GqaSpec) else _mla(spec.attention)
        yield from (f"{layer}.self_attn.{name}" for name in attention)
        yield from _moe(spec, layer, names) if sparse else _ffn(f"{layer}.mlp")


def _gqa(a: GqaSpec) -> Iterator[str]:
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        yield f"{name}.weight"
        if a.bias:
            yield f"{name}.bias"
    if a.qk_norm is not QkNorm.NONE:
        yield from ("q_norm.weight", "k_norm.weight")


def _mla(a: MlaSpec) -> Iterator[str]:
    yield from (f"{name}.weight" for name in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"))
    if a.q_lora:
        yield from (f"{name}.weight" for name in ("q_a_proj", "q_a_layernorm", "q_b_proj"))
    else:
        yield "q_proj.weight"
    if a.bias:
        yield from ("kv_a_proj_with_mqa.bias", "o_proj.bias")
        if a.q_lora:
            yield "q_a_proj.bias"


def _moe(spec: ModelSpec, layer: str, names: Collection[str]) -> Iterator[str]:
    blocks = [f"{layer}.{block}" for block in spec.names.blocks]
    block = next((one for one in blocks if f"{one}.gate.weight" in names), blocks[0])
    yield f"{block}.gate.weight"
    if spec.router.bias:
        yield f"{block}.gate.e_score_correction_bias"
    if spec.shared_ffn:
        yield from _ffn(f"{block}.shared_experts")
    if f"{block}.experts.gate_up_proj" in names:
        yield from (f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj")
        return
    for expert in range(spec.router.num_experts):
        for part in (spec.names.gate, spec.names.up, spec.names.down):
            yield f"{block}.experts.{expert}.{part}.weight"


def _ffn(prefix: str) -> Iterator[str]:
    yield from (f"{prefix}.{part}_proj.weight" for part in ("gate", "up", "down"))


def _few(names: Collection[str], shown: int = 3) -> str:
    """How many they are, and the first ones."""
    first = ", ".join(name if name.isprintable() else ascii(name) for name in list(names)[:shown])
    return f"{len(names):,}: {first}" + (", ..." if len(names) > shown else "")
