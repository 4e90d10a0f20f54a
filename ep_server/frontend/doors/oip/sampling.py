"""Sampling parameters of Triton's vLLM backend, as fields of a GenerateRequest.

They come as JSON in the tensor `sampling_parameters`, or one by one as parameters of the request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from ep_server.errors import InvalidArgument
from ep_server.frontend.doors.oip.tensors import SHOWN
from ep_server.v1 import decode_pb2

Read = Callable[[str, Any], Any]  # (name, value) -> value of the field; raises InvalidArgument


@dataclass(frozen=True, slots=True)
class Key:
    """One parameter. field: of GenerateRequest, dotted. kind: what its JSON value is, for the reference."""

    field: str
    kind: str
    read: Read
    meaning: str = ""


def parse_json(name: str, text: str) -> dict[str, Any]:
    """A JSON object. Raises: InvalidArgument."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise InvalidArgument(name, text[:SHOWN], "JSON that is less deeply nested") from None
    except ValueError as error:
        raise InvalidArgument(name, text[:SHOWN], f"a JSON object ({error})") from None
    if not isinstance(value, dict):
        raise InvalidArgument(name, text[:SHOWN], "a JSON object")
    return value


def fill(request: Any, values: Mapping[str, Any], source: str) -> dict[str, str]:
    """Sets the fields of a GenerateRequest; null means absent.

    source: what the names of the values begin with in errors. Returns: names of the fields as the caller gave
    them, for errors. Raises: InvalidArgument.
    """
    names: dict[str, str] = {}
    for key, value in values.items():
        name = f"{source}.{shown_name(key)}"
        known = KEYS.get(key)
        if known is None:
            raise InvalidArgument(name, _shown(value), f"absent; known parameters are {', '.join(KEYS)}")
        if value is None:
            continue
        if known.field in names:
            raise InvalidArgument(name, _shown(value), f"absent beside {names[known.field]}")
        names[known.field] = name
        if known.field == "grammar":
            names |= {f"grammar.{ours}": f"{name}.{theirs}" for theirs, ours in _GRAMMARS.items()}
        _set(request, known.field, known.read(name, value))
    return names


def _set(message: Any, field: str, value: Any) -> None:
    *path, last = field.split(".")
    for part in path:
        message = getattr(message, part)
    if isinstance(value, list):
        getattr(message, last).extend(value)
    elif isinstance(value, dict):
        getattr(message, last).update(value)
    elif hasattr(value, "DESCRIPTOR"):
        getattr(message, last).CopyFrom(value)
    else:
        setattr(message, last, value)


def shown_name(name: str) -> str:
    """A name that the caller made up, in ASCII, as errors repeat it."""
    return ascii(name[:SHOWN])[1:-1]


def number(name: str, value: Any) -> float:
    """A number, or text of one."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    raise InvalidArgument(name, _shown(value), "a number")


def integer(low: int, high: int) -> Read:
    """Reads a whole number within these bounds, or text of one."""

    def read(name: str, value: Any) -> Any:
        given = value
        if isinstance(value, str) and len(value) <= SHOWN:
            try:
                given = int(value)
            except ValueError:
                given = None
        elif isinstance(value, float) and value.is_integer():
            given = int(value)
        if isinstance(given, bool) or not isinstance(given, int) or not low <= given <= high:
            raise InvalidArgument(name, _shown(value), f"a whole number from {low} to {high}")
        return given

    return read


def flag(name: str, value: Any) -> bool:
    """A boolean, or its name."""
    named = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(named, bool):
        raise InvalidArgument(name, _shown(value), "true or false")
    return named


def text(name: str, value: Any) -> str:
    """Text that UTF-8 can hold."""
    try:
        if isinstance(value, str):
            value.encode()
            return value
    except UnicodeEncodeError:
        raise InvalidArgument(name, ascii(value)[:SHOWN], "text without lone surrogates") from None
    raise InvalidArgument(name, _shown(value), "text")


uint32 = integer(0, 2**32 - 1)


def _top_k(name: str, value: Any) -> int:
    given: int = integer(-1, 2**32 - 1)(name, value)
    return max(given, 0)


def _texts(name: str, value: Any) -> list[str]:
    """One text counts as a list of one."""
    given = value if isinstance(value, list) else [value]
    return [text(name, each) for each in given]


def _ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise InvalidArgument(name, _shown(value), "a list of token ids")
    return [uint32(name, each) for each in value]


def _bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise InvalidArgument(name, _shown(value), "an object from token id to number")
    return {uint32(name, token): number(name, bias) for token, bias in value.items()}


def _grammar(name: str, value: Any) -> Any:
    """A Grammar of an object with one of its keys, or of the JSON text of such an object."""
    given = parse_json(name, value) if isinstance(value, str) else value
    if not isinstance(given, dict):
        raise InvalidArgument(name, _shown(value), "an object")
    chosen = {key: each for key, each in given.items() if each is not None}
    if len(chosen) != 1 or not chosen.keys() <= _GRAMMARS.keys():
        shown = ", ".join(shown_name(key) for key in list(chosen)[:5])
        raise InvalidArgument(name, shown, f"an object with one of {', '.join(_GRAMMARS)}")
    [(key, source)] = chosen.items()
    name, grammar = f"{name}.{key}", decode_pb2.Grammar()
    if key == "json_object":
        grammar.json_object = flag(name, source)
    elif key == "choice":
        grammar.choice.choices.extend(_texts(name, source))
        grammar.choice.SetInParent()
    else:
        written = _json_text(name, source) if isinstance(source, dict) else source
        setattr(grammar, _GRAMMARS[key], text(name, written))
    return grammar


def _json_text(name: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except RecursionError:
        raise InvalidArgument(name, _shown(value), "JSON that is less deeply nested") from None


def _ticked(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _shown(value: Any) -> Any:
    """The value as an error message repeats it."""
    if isinstance(value, list | dict):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, int) and abs(value) >= 1 << 256:
        return f"a number of {value.bit_length()} bits"
    return ascii(value[:SHOWN]) if isinstance(value, str) else value


# Keys of structured_outputs -> fields of Grammar.
_GRAMMARS: Final[Mapping[str, str]] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}
# By name; `logprobs` is "top_n" and switches output_logprobs on.
KEYS: Final[Mapping[str, Key]] = {
    "temperature": Key("sampling.temperature", "number", number),
    "top_p": Key("sampling.top_p", "number", number),
    "top_k": Key("sampling.top_k", "integer", _top_k, "-1 and 0 keep all tokens."),
    "min_p": Key("sampling.min_p", "number", number),
    "seed": Key("sampling.seed", "integer", integer(0, 2**64 - 1)),
    "repetition_penalty": Key("sampling.repetition_penalty", "number", number),
    "presence_penalty": Key("sampling.presence_penalty", "number", number),
    "frequency_penalty": Key("sampling.frequency_penalty", "number", number),
    "logit_bias": Key("sampling.logit_bias", "object", _bias, "From token id to number."),
    "allowed_token_ids": Key("sampling.allowed_token_ids", "list of integers", _ids),
    "n": Key("sampling.num_sequences", "integer", uint32, "Outputs have one element per sequence."),
    "max_tokens": Key("stopping.max_new_tokens", "integer", uint32),
    "min_tokens": Key("stopping.min_new_tokens", "integer", uint32),
    "stop": Key("stopping.stop_strings", "text or list of texts", _texts),
    "stop_token_ids": Key("stopping.stop_token_ids", "list of integers", _ids),
    "include_stop_str_in_output": Key("stopping.include_stop", "boolean", flag),
    "ignore_eos": Key("stopping.ignore_eos", "boolean", flag),
    "structured_outputs": Key("grammar", "object", _grammar, f"One of {_ticked(_GRAMMARS)}."),
    "guided_decoding": Key("grammar", "object", _grammar, "The older name of `structured_outputs`."),
    "logprobs": Key("response.top_n", "integer", uint32, "Alternatives per token in the output `logprobs`."),
}
