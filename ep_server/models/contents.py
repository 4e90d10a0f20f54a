"""Which tensors of a checkpoint its model reads, and which config.json wrongly leaves out. Names only.

Follows weights.py tensor by tensor; needs no torch. A tensor that another value of a field would use is an
error: the model that config.json describes is not the one whose weights these are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ep_server.errors import CheckpointError
from ep_server.models.families.spec import EMBEDDING, HEAD, GqaSpec, MlaSpec, ModelSpec, QkNorm

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
