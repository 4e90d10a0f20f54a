"""Known model families: config.json and generation_config.json to a ModelSpec. Knows nothing of torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from ep_server.errors import CheckpointError
from ep_server.model.checkpoint import is_directory, is_there, read_file, read_json
from ep_server.model.families import deepseek_v2, deepseek_v3, mixtral, olmoe, qwen3_moe
from ep_server.model.families.fields import Fields
from ep_server.model.families.spec import ModelSpec

__all__ = ["FAMILIES", "ModelSpec", "is_directory", "is_there", "read_file", "read_json", "read_spec"]

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


def read_spec(path: str | Path) -> ModelSpec:
    """Reads what a Hugging Face checkpoint directory says about its model; opens no weights.

    EOS ids are those of generation_config.json where it names any, else those of config.json.
    Raises: CheckpointError for a missing file, an unknown architecture or a field out of range.
    """
    directory = Path(path)
    if not is_directory(directory):
        raise CheckpointError(f"{directory}: not a directory")
    file = directory / "config.json"
    config = Fields(read_json(file), str(file))
    spec = FAMILIES[_family(config)](config)
    if spec.router.top_k > spec.router.num_experts:
        raise config.error("num_experts_per_tok", spec.router.top_k, f"at most {spec.router.num_experts}")
    generation = directory / "generation_config.json"
    if is_there(generation):
        eos = Fields(read_json(generation), str(generation)).token_ids("eos_token_id")
        spec = dataclasses.replace(spec, eos_token_ids=eos or spec.eos_token_ids)
    return spec


def _family(config: Fields) -> str:
    model_type, architectures = config.values.get("model_type"), config.values.get("architectures")
    known: dict[str, str] = {**{name: name for name in FAMILIES}, **_ARCHITECTURES}
    for name in (model_type, *(architectures if isinstance(architectures, list) else ())):
        if isinstance(name, str) and name in known:
            return known[name]
    raise CheckpointError(
        f"{config.source}: model_type = {model_type!r}: unknown architecture; known: {', '.join(FAMILIES)}"
    )
