"""Typed access to config.json in the spellings of transformers 4 and 5.

A wrong or missing field raises a CheckpointError that names the file, the field, its value and what is
allowed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ep_server.errors import CheckpointError

LARGEST = 1 << 30
# What is counted out before anything is loaded: more would take all time and memory instead of being refused.
COUNTED = {
    "num_hidden_layers": 1 << 12,
    "max_position_embeddings": 1 << 24,  # each has its rotation in a table
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 1 << 16),
}
# Keys that change no token. They are not reported as unread.
IGNORED = frozenset(
    (
        # of the files and the programs that wrote them
        *("architectures", "model_type", "auto_map", "transformers_version", "tokenizer_class"),
        *("_name_or_path", "name_or_path", "_commit_hash", "_attn_implementation_autoset"),
        # of training
        *("initializer_range", "attention_dropout", "gradient_checkpointing", "router_aux_loss_coef"),
        *(
            "router_jitter_noise",
            "output_router_logits",
            "aux_loss_alpha",
            "seq_aux",
            "ep_size",
            "pretraining_tp",
        ),
        # of what programs other than this server return, pad or label
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict", "is_encoder_decoder"),
        *("is_decoder", "pad_token_id", "id2label", "label2id", "problem_type", "chunk_size_feed_forward"),
        # layers that predict further tokens are not served; inspect names their tensors
        "num_nextn_predict_layers",
        # the tensors' own dtypes say which are FP8; activations follow this server's options
        *(
            "quantization_config.activation_scheme",
            "quantization_config.fmt",
            "quantization_config.scale_fmt",
        ),
        *("quantization_config.modules_to_not_convert", "quantization_config.ignored_layers"),
    )
)


@dataclass(frozen=True, slots=True)
class Fields:
    """A config.json. `source` is the file, for messages.

    A key may be absent or null, and transformers tells the two apart. `default` is what an absent key means,
    `null` what a null one means; None = it is refused.
    """

    values: Mapping[str, Any]
    source: str
    prefix: str = ""  # of the names of a nested object's fields
    read: set[str] = field(
        default_factory=set, compare=False, repr=False
    )  # names with prefix, of all objects

    def has(self, *names: str) -> bool:
        """Any of the spellings is given."""
        return any(self.values.get(name) is not None for name in names)

    def value(self, *names: str, default: Any = None, null: Any = None) -> Any:
        """The first spelling that is given; `null`, which may be None, if all that are there are null."""
        name = self._spelling(names)
        self.skip(*(other for other in names if self.values.get(other) == self.values.get(name)))
        if name not in self.values and default is None:
            raise CheckpointError(f"{self.source}: {' / '.join(names)} is missing")
        given = self.values.get(name, default)
        return null if given is None else given

    def integer(self, *names: str, default: int | None = None, null: int | None = None, low: int = 1) -> int:
        """An integer of at least `low`, and no larger than any model has it."""
        value = self.value(*names, default=default, null=null)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.error(self._spelling(names), value, f"an integer of at least {low}")
        if value > (high := COUNTED.get(names[0], LARGEST)):
            raise self.error(self._spelling(names), value, f"an integer of at most {high}")
        return value

    def number(
        self,
        *names: str,
        default: float | None = None,
        null: float | None = None,
        above: float = -math.inf,
    ) -> float:
        """A finite number above another."""
        value = self.value(*names, default=default, null=null)
        known = isinstance(value, int | float) and not isinstance(value, bool)
        if not known or not above < value < math.inf or abs(value) > sys.float_info.max:
            allowed = "a finite number" + (f" above {above:g}" if above > -math.inf else "")
            raise self.error(self._spelling(names), value, allowed)
        return float(value)

    def flag(self, *names: str, default: bool = False, null: bool | None = None) -> bool:
        """true or false."""
        value = self.value(*names, default=default, null=null)
        if not isinstance(value, bool):
            raise self.error(self._spelling(names), value, "true or false")
        return value

    def choice(
        self, *names: str, allowed: tuple[str, ...], default: str | None = None, null: str | None = None
    ) -> str:
        """One of a few words."""
        value = self.value(*names, default=default, null=null)
        if value not in allowed:
            raise self.error(self._spelling(names), value, "one of " + ", ".join(allowed))
        return str(value)

    def token_ids(self, *names: str, default: Sequence[int] = ()) -> tuple[int, ...]:
        """Zero, one or several token ids; null = none."""
        value: Any = self.value(*names, default=list(default), null=[])
        ids = value if isinstance(value, list) else [value]
        if not all(map(_is_index, ids)):
            raise self.error(self._spelling(names), value, "a token id or a list of them, 0 or more each")
        return tuple(ids)

    def indices(self, name: str) -> frozenset[int]:
        """A list of numbers that count from 0; empty if it is absent or null."""
        value = self.value(name, default=[], null=[])
        if not isinstance(value, list) or not all(map(_is_index, value)):
            raise self.error(name, value, "a list of integers of at least 0")
        return frozenset(value)

    def words(self, name: str) -> tuple[str, ...]:
        """A list of words; empty if it is absent or null."""
        value = self.value(name, default=[], null=[])
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.error(name, value, "a list of strings")
        return tuple(value)

    def table(self, *names: str) -> Fields:
        """A nested object; empty if it is absent or null."""
        value, name = self.value(*names, default={}, null={}), self._spelling(names)
        if not isinstance(value, Mapping):
            raise self.error(name, value, "an object")
        return Fields(value, f"{self.source}: {name}", f"{self.prefix}{name}.", self.read)

    def skip(self, *names: str) -> None:
        """These keys count as read: they mean nothing to this model."""
        self.read.update(self.prefix + name for name in names)

    def unread(self) -> tuple[str, ...]:
        """Keys that say something, that nobody has read and that are not in IGNORED; in their order."""
        found: list[str] = []
        for key, value in self.values.items():
            name = self.prefix + key
            if value is None or value in ([], {}) or name in IGNORED:
                continue
            if name not in self.read:
                found.append(name)
            elif isinstance(value, Mapping):
                found += Fields(value, self.source, f"{name}.", self.read).unread()
        return tuple(found)

    def _spelling(self, names: tuple[str, ...]) -> str:
        """The one that counts, also in messages: the first given, else the first null, else the first."""
        there = [name for name in names if name in self.values]
        return next((name for name in there if self.values[name] is not None), next(iter(there), names[0]))

    def error(self, name: str, value: Any, allowed: str) -> CheckpointError:
        """The error of a field out of range."""
        shown = "null" if value is None else repr(value)
        return CheckpointError(f"{self.source}: {name} = {shown}: must be {allowed}")


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST
