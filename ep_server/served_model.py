"""What the front needs to know of the model it serves: limits, names, defaults, tokenizer. No tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ep_server.config import ModelConfig
from ep_server.errors import CheckpointError, ConfigError
from ep_server.records import Sampling
from ep_server.tokenizer import Tokenizer

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as clients see it. max_context: longest prompt + output, tokens.

    defaults: of sampling, from generation_config.json. num_experts: routed experts of one MoE layer.
    """

    name: str
    vocab_size: int
    max_context: int
    eos_token_ids: frozenset[int] = frozenset()
    defaults: Sampling = field(default_factory=Sampling)
    tokenizer: Tokenizer | None = None
    architecture: str = ""
    num_layers: int = 0
    hidden_size: int = 0
    num_experts: int = 0
    experts_per_token: int = 0

    @staticmethod
    def load(config: ModelConfig) -> ServedModel:
        """Reads config.json, generation_config.json and tokenizer.json of the checkpoint directory.

        Raises: ConfigError (path, max_context), CheckpointError.
        """
        directory = Path(config.path)
        if not config.path or not directory.is_dir():
            raise ConfigError("model.path", config.path, "a checkpoint directory")
        model = _read(directory / "config.json")
        file = directory / "generation_config.json"
        generation = _read(file) if file.is_file() else {}
        limit = _positive(model, "max_position_embeddings", directory)
        if config.max_context > limit:
            raise ConfigError("model.max_context", config.max_context, f"at most the model's {limit}")
        return ServedModel(
            name=config.name or directory.resolve().name,
            vocab_size=_positive(model, "vocab_size", directory),
            max_context=config.max_context or limit,
            eos_token_ids=frozenset(_ids(generation.get("eos_token_id", model.get("eos_token_id")))),
            defaults=_defaults(generation),
            tokenizer=Tokenizer.load(directory),
            architecture=str(model.get("model_type", "")),
            num_layers=int(model.get("num_hidden_layers", 0)),
            hidden_size=int(model.get("hidden_size", 0)),
            num_experts=next((int(model[key]) for key in _EXPERTS if model.get(key)), 0),
            experts_per_token=int(model.get("num_experts_per_tok") or 0),
        )


def _read(file: Path) -> Mapping[str, Any]:
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: not JSON ({error})") from error
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"{file}: not a JSON object")
    return tree


def _positive(model: Mapping[str, Any], key: str, directory: Path) -> int:
    value = model.get(key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{directory / 'config.json'}: {key} = {value!r}, must be a positive integer")
    return value


def _ids(value: Any) -> Iterable[int]:
    return value if isinstance(value, list) else () if value is None else (int(value),)


def _defaults(generation: Mapping[str, Any]) -> Sampling:
    """Every field of Sampling that the file gives under the same name; do_sample false means greedy."""
    kinds = {"temperature": float, "top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float}
    given = {
        item.name: kinds[item.name](generation[item.name])
        for item in fields(Sampling)
        if item.name in kinds and generation.get(item.name) is not None
    }
    sampling = replace(Sampling(), **given)
    return replace(sampling, temperature=0.0) if generation.get("do_sample") is False else sampling
