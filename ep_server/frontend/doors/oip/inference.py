"""Turns a ModelInferRequest into a GenerateRequest and the form of its responses."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ep_server.errors import InvalidArgument, NotFound
from ep_server.frontend.doors.oip import sampling
from ep_server.frontend.doors.oip.tensors import FLAGS, OUTPUTS, SHOWN, read_inputs, text_of
from ep_server.frontend.requests import MAX_DEADLINE_MS, MAX_GRAMMAR_BYTES, MAX_REQUEST_ID, OTHER_BYTES
from ep_server.frontend.served_model import ServedModel
from ep_server.v1 import decode_pb2

VERSION: Final = "1"  # of the model; there is one
PRIORITY_LEVELS: Final = 9  # 1 is the most urgent
DEFAULT_PRIORITY: Final = 5
JSON_ID_BYTES = 8  # of a token id in a list, at most
_SUFFIX = 16  # characters that make an id unique


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """What responses contain. outputs: names in order. prompt: what text_output begins with."""

    id: str
    model_name: str
    outputs: tuple[str, ...]
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class Inference:
    """One request. streams: several responses. names: fields of GenerateRequest -> the caller's."""

    generate: Any
    form: ResponseForm
    streams: bool
    names: Mapping[str, str] = field(default_factory=dict)


def read_request(request: Any, model: ServedModel, max_context: int) -> Inference:
    """Raises: InvalidArgument, NotFound, ContextLengthExceeded."""
    check_model(request.model_name, request.model_version, model.name)
    inputs = read_inputs(request, max_context)
    streams = _flag(inputs, "stream", default=False)
    generate = decode_pb2.GenerateRequest(request_id=_unique(request.id))
    prompt = _set_prompt(generate, inputs)
    excluded = _flag(inputs, "exclude_input_in_output", default=streams or not prompt)
    if not excluded and (streams or not prompt):
        allowed = "true with stream, and with input_ids"
        raise InvalidArgument("exclude_input_in_output", False, allowed)
    names = _set_parameters(generate, request, inputs, _longest_parameters(model))
    outputs = _outputs(request, inputs)
    if "output_ids" in outputs and generate.sampling.num_sequences > 1:
        allowed = "1 with output_ids, whose rows would differ in length"
        raise InvalidArgument(names["sampling.num_sequences"], generate.sampling.num_sequences, allowed)
    _set_response(generate, outputs, scored="response.top_n" in names)
    form = ResponseForm(request.id, model.name, outputs, "" if excluded else prompt)
    return Inference(generate, form, streams, _NAMES | names)


def check_model(name: str, version: str, served: str) -> None:
    """Raises: NotFound."""
    if name != served:
        raise NotFound(f"model {name[:SHOWN]!r} is not served here; this server serves {served!r}")
    if version not in ("", VERSION):
        raise NotFound(f"model {served!r} has no version {version[:SHOWN]!r}: its version is {VERSION!r}")


_NAMES: Final = {
    "text": "text_input",
    "token_ids.ids": "input_ids",
    "deadline_ms": "parameters.timeout",
    **{key.field: f"sampling_parameters.{name}" for name, key in sampling.KEYS.items()},
}


def _unique(given: str) -> str:
    """The id for the log. Unlike ours, an id of this protocol need not be unique."""
    own = secrets.token_hex(_SUFFIX // 2)
    usable = len(given) < MAX_REQUEST_ID - _SUFFIX and all("!" <= c <= "~" for c in given)
    return f"{given}-{own}" if given and usable else own


def _flag(inputs: Mapping[str, Sequence[Any]], name: str, *, default: bool) -> bool:
    return bool(inputs[name][0]) if name in inputs else default


def _set_prompt(generate: Any, inputs: Mapping[str, Sequence[Any]]) -> str:
    """Returns: the prompt's text, "" for token ids."""
    if ("text_input" in inputs) == ("input_ids" in inputs):
        given = "both" if "text_input" in inputs else "none"
        raise InvalidArgument("inputs", given, "one of text_input and input_ids")
    if "text_input" in inputs:
        generate.text = text_of("text_input", inputs["text_input"][0])
        if not generate.text:
            raise InvalidArgument("text_input", "", "at least one character")
        text: str = generate.text
        return text
    ids = np.asarray(inputs["input_ids"], np.int64)
    wrong = np.flatnonzero((ids < 0) | (ids >= 2**32))
    if wrong.size:
        raise InvalidArgument(f"input_ids[{wrong[0]}]", int(ids[wrong[0]]), "a token id")
    generate.token_ids.ids.extend(ids.tolist())
    return ""


def _longest_parameters(model: ServedModel) -> int:
    """Bytes of JSON with every id of the vocabulary and the largest grammar, escaped."""
    return JSON_ID_BYTES * model.vocab_size + 2 * MAX_GRAMMAR_BYTES + OTHER_BYTES


def _set_parameters(
    generate: Any, request: Any, inputs: Mapping[str, Sequence[Any]], longest: int
) -> dict[str, str]:
    """longest: bytes of JSON. Returns: names of the fields as the caller gave them."""
    given = {key: _value(key, parameter) for key, parameter in request.parameters.items()}
    for key in sorted(given.keys() & _RESERVED.keys()):
        _RESERVED[key](generate, f"parameters.{key}", given.pop(key))
    names = {}
    if "sampling_parameters" in inputs:
        data = inputs["sampling_parameters"][0]
        if len(data) > longest:
            raise InvalidArgument("sampling_parameters", f"{len(data)} bytes", f"at most {longest} bytes")
        text = text_of("sampling_parameters", data)
        parsed = sampling.parse_json("sampling_parameters", text)
        names = sampling.fill(generate, parsed, "sampling_parameters")
    for key in sorted(given):
        known = sampling.KEYS.get(key)
        if known is not None and known.field in names:
            raise InvalidArgument(f"parameters.{key}", given[key], f"absent beside {names[known.field]}")
    return names | sampling.fill(generate, given, "parameters")


def _value(key: str, parameter: Any) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        raise InvalidArgument(f"parameters.{sampling.shown_name(key)}", None, "a value")
    return getattr(parameter, kind)


def _priority(generate: Any, name: str, value: Any) -> None:
    """0 is the default level. Ours are higher first."""
    level = sampling.integer(0, PRIORITY_LEVELS)(name, value)
    generate.priority = DEFAULT_PRIORITY - level if level else 0


def _timeout(generate: Any, name: str, value: Any) -> None:
    """Microseconds; 0 is none."""
    micros = sampling.integer(0, MAX_DEADLINE_MS * 1000)(name, value)
    if micros:
        generate.deadline_ms = -(-micros // 1000)


def _no_sequence(_generate: Any, name: str, value: Any) -> None:
    if value not in (0, "", False):
        raise InvalidArgument(name, value, "absent: the model keeps no state between requests")


def _empty_final(_generate: Any, name: str, value: Any) -> None:
    """Nothing to do: the final response of a request is never empty."""
    sampling.flag(name, value)


_RESERVED: Final = {
    "priority": _priority,
    "timeout": _timeout,
    "sequence_id": _no_sequence,
    "sequence_start": _no_sequence,
    "sequence_end": _no_sequence,
    "triton_enable_empty_final_response": _empty_final,
}


def _outputs(request: Any, inputs: Mapping[str, Sequence[Any]]) -> tuple[str, ...]:
    """The outputs that the request lists, else the prompt's kind and what the flags ask for."""
    listed: list[str] = []
    for output in request.outputs:
        if output.name not in OUTPUTS or output.name in listed:
            allowed = f"each given once, one of {', '.join(OUTPUTS)}"
            raise InvalidArgument("outputs.name", output.name[:SHOWN], allowed)
        for key in sorted(output.parameters)[:1]:
            allowed = "absent: classification and shared memory are not supported"
            raise InvalidArgument(f"{output.name}.parameters", key[:SHOWN], allowed)
        listed.append(output.name)
    if listed:
        return tuple(listed)
    first = "text_output" if "text_input" in inputs else "output_ids"
    return (first, *(name for flag, name in FLAGS.items() if _flag(inputs, flag, default=False)))


def _set_response(generate: Any, outputs: Sequence[str], *, scored: bool) -> None:
    generate.response.output_text = "text_output" in outputs
    generate.response.output_token_ids = "output_ids" in outputs
    wanted = "logprobs" in outputs or "cumulative_logprob" in outputs
    generate.response.output_logprobs = wanted or scored
