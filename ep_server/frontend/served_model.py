"""The model as the frontend sees it: limits, names, tokenizer, sampling ranges and defaults. No tensors."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ep_server.config import ModelConfig
from ep_server.errors import CheckpointError, ConfigError
from ep_server.models.families import is_directory, is_there, read_json, read_spec
from ep_server.models.sizes import context_limit
from ep_server.records import Sampling
from ep_server.text.chat_template import ChatTemplate
from ep_server.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Range:
    """Finite numbers from low to high, low itself only where `closed`."""

    low: float
    high: float = math.inf
    closed: bool = True

    def holds(self, value: float) -> bool:
        """Whether the value is allowed; NaN and infinities never are."""
        above = value >= self.low if self.closed else value > self.low
        return math.isfinite(value) and above and value <= self.high

    def __str__(self) -> str:
        low = f"at least {self.low:g}" if self.closed else f"above {self.low:g}"
        return low + (f", at most {self.high:g}" if self.high < math.inf else ", finite")


SAMPLING_RANGES = {
    "temperature": Range(0),
    "top_k": Range(0),
    "top_p": Range(0, 1, closed=False),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0.01, 100),  # beyond, a logit times it leaves float32
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
}


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
    chat_template: ChatTemplate | None = None

    @staticmethod
    def load(config: ModelConfig) -> ServedModel:
        """Reads the checkpoint directory's configuration, tokenizer and chat template.

        Raises: ConfigError (path, max_context), CheckpointError.
        """
        directory = Path(config.path)
        if not config.path or not is_directory(directory):
            raise ConfigError("model.path", config.path, "a checkpoint directory")
        spec = read_spec(directory)
        return ServedModel(
            name=config.name or directory.resolve().name,
            vocab_size=spec.vocab_size,
            max_context=context_limit(spec, config.max_context),
            # Ids beyond the vocabulary, which some checkpoints list, are never drawn.
            eos_token_ids=frozenset(token for token in spec.eos_token_ids if token < spec.vocab_size),
            defaults=_defaults(directory / "generation_config.json"),
            tokenizer=Tokenizer.load(directory),
            architecture=spec.family,
            num_layers=spec.num_layers,
            hidden_size=spec.hidden,
            num_experts=spec.router.num_experts,
            experts_per_token=spec.router.top_k,
            chat_template=_chat_template(directory),
        )


def _chat_template(directory: Path) -> ChatTemplate | None:
    """A broken template refuses chats, not the model."""
    try:
        return ChatTemplate.load(directory)
    except CheckpointError as error:
        log.warning("%s; chat prompts are refused, other prompts work", error)
        return None


def _defaults(file: Path) -> Sampling:
    """Every number of Sampling that the file gives under the same name; do_sample false means greedy."""
    generation = read_json(file) if is_there(file) else {}
    given: dict[str, Any] = {}
    for name, allowed in SAMPLING_RANGES.items():
        value = generation.get(name)
        if value is None:
            continue
        kind = int if name == "top_k" else float
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or not allowed.holds(value):
            raise CheckpointError(f"{file}: {name} = {value!r}: must be {allowed}")
        given[name] = kind(value)
    sampling = replace(Sampling(), **given)
    return replace(sampling, temperature=0.0) if generation.get("do_sample") is False else sampling
