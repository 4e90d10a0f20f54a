"""The supported model families: config.json and generation_config.json to a ModelSpec, without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from ep_server import _C
from ep_server.errors import CheckpointError
from ep_server.models.checkpoint import Checkpoint, is_directory, is_there, read_file, read_json
from ep_server.models.families import deepseek_v2, deepseek_v3, mixtral, olmoe, qwen3_moe
from ep_server.models.families.fields import Fields
from ep_server.models.families.spec import EMBEDDING, HEAD, ModelSpec

__all__ = [
    "FAMILIES",
    "ModelSpec",
    "is_directory",
    "is_there",
    "read_file",
    "read_json",
    "read_spec",
    "unread_keys",
]

FAMILIES: Mapping[str, Callable[[Fields], ModelSpec]] = MappingProxyType(
    {
        "qwen3_moe": qwen3_moe.spec,
        "olmoe": olmoe.spec,
        "mixtral": mixtral.spec,
        "deepseek_v2": deepseek_v2.spec,
        "deepseek_v3": deepseek_v3.spec,
    }
)

# Checkpoints with a model_type of their own that run the architecture of a family.
_ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "Qwen3MoeForCausalLM": "qwen3_moe",
        "OlmoeForCausalLM": "olmoe",
        "MixtralForCausalLM": "mixtral",
        "DeepseekV2ForCausalLM": "deepseek_v2",
        "DeepseekV3ForCausalLM": "deepseek_v3",
    }
)

# Stored dtypes in which a model computes, by what config.json calls them; float64 is served as float32.
_DTYPES: Mapping[str, str] = MappingProxyType(
    {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float32"}
)


def read_spec(path: str | Path) -> ModelSpec:
    """Reads what a Hugging Face checkpoint directory says about its model; of weights, the headers at most.

    EOS ids are those of generation_config.json where it names any, else those of config.json.
    Raises: CheckpointError for a missing file, an unknown architecture or a field out of range.
    """
    directory = Path(path)
    if not is_directory(directory):
        raise CheckpointError(f"{directory}: not a directory")
    file = directory / "config.json"
    config = Fields(read_json(file), str(file))
    spec = FAMILIES[_family(config)](config)
    _check_top_k(config, spec)
    spec = _as_stored(spec, directory)
    generation = directory / "generation_config.json"
    if is_there(generation):
        eos = Fields(read_json(generation), str(generation)).token_ids("eos_token_id")
        spec = dataclasses.replace(spec, eos_token_ids=eos or spec.eos_token_ids)
    return spec


def _check_top_k(config: Fields, spec: ModelSpec) -> None:
    top_k, experts = spec.router.top_k, spec.router.num_experts
    if top_k > experts:
        raise config.error("num_experts_per_tok", top_k, f"at most {experts}")
    if top_k > _C.MAX_TOP_K:
        allowed = f"at most {_C.MAX_TOP_K}: kernels of the exchange hold no more choices of a token"
        raise config.error("num_experts_per_tok", top_k, allowed)


def _as_stored(spec: ModelSpec, directory: Path) -> ModelSpec:
    """Corrects what the tensors decide, as in transformers.

    They name the dtype if config.json does not. A head that is stored beside the embedding is not tied.
    """
    if spec.dtype is not None and not spec.tied_head:
        return spec
    try:
        checkpoint = Checkpoint.open(directory)
    except CheckpointError:  # loading raises it again; plans and dummy weights need no tensors
        return spec
    stored = checkpoint.tensors
    tied = spec.tied_head and not (EMBEDDING in stored and HEAD in stored)
    return dataclasses.replace(spec, dtype=spec.dtype or _stored_dtype(checkpoint), tied_head=tied)


def _stored_dtype(checkpoint: Checkpoint) -> str | None:
    """The dtype of the first tensor, by shard and then by name, that is neither FP8 nor integers.

    transformers takes the same one.
    """
    ordered = sorted(checkpoint.tensors.values(), key=lambda tensor: (str(tensor.file), tensor.name))
    return next((_DTYPES[tensor.dtype] for tensor in ordered if tensor.dtype in _DTYPES), None)


def unread_keys(path: str | Path) -> tuple[str, ...]:
    """Keys of config.json that may say something of the model and are not read; dotted where nested.

    Raises: as read_spec().
    """
    file = Path(path) / "config.json"
    config = Fields(read_json(file), str(file))
    FAMILIES[_family(config)](config)
    return config.unread()


def _family(config: Fields) -> str:
    model_type, architectures = config.values.get("model_type"), config.values.get("architectures")
    known: dict[str, str] = {**{name: name for name in FAMILIES}, **_ARCHITECTURES}
    for name in (model_type, *(architectures if isinstance(architectures, list) else ())):
        if isinstance(name, str) and name in known:
            return known[name]
    raise CheckpointError(
        f"{config.source}: model_type = {model_type!r}: unknown architecture; known: {', '.join(FAMILIES)}"
    )
