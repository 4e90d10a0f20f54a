"""[2] Turns a GenerateRequest of VllmEngine into ours. What ours cannot express is refused by name.

Proto3 numbers without `optional` cannot be absent: 0 means unset there, and the model's default applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from ep_server.errors import ContextLengthExceeded, InvalidArgument
from ep_server.frontend import requests
from ep_server.frontend.doors.vllm_engine import kv_transfer
from ep_server.frontend.doors.vllm_engine.protocol import pb
from ep_server.frontend.messages import field_counts
from ep_server.frontend.requests import Limits
from ep_server.frontend.served_model import ServedModel
from ep_server.v1 import decode_pb2

_ABSENT: Final = {
    "kv_transfer_params": "this server takes kv_transfer_params_json",
    "mm_inputs": "this model reads text only",
    "extra_mm_inputs": "this model reads text only",
    "media_refs": "this model reads text only",
}
# 0 means unset. Names as in our Sampling.
_ZERO_UNSET: Final = (
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
_CONSTRAINTS: Final = {
    "json_schema": "json_schema",
    "regex": "regex",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
    "json_object": "json_object",
}
_P: Final = "sampling_params."
# Fields of our GenerateRequest -> of theirs, for errors.
NAMES: Final[Mapping[str, str]] = {
    "prompt": "input",
    "token_ids.ids": "tokenized.input_ids",
    "dp_rank": "data_parallel_rank",
    "hold_kv": f"{kv_transfer.FIELD}.do_remote_decode",
    "kv_handle": f"{kv_transfer.FIELD}.do_remote_prefill",
    **{
        f"kv_handle.{name}": f"{kv_transfer.FIELD}.remote_handle.{name}"
        for name in ("local", "key", "tokens", "prompt", "format")
    },
    "kv_handle.address": f"{kv_transfer.FIELD}.remote_host",
    "sampling.num_sequences": f"{_P}n",
    "stopping.max_new_tokens": f"{_P}max_tokens",
    "stopping.min_new_tokens": f"{_P}min_tokens",
    "stopping.stop_strings": f"{_P}stop",
    "stopping.stop_token_ids": f"{_P}stop_token_ids",
    "stopping.ignore_eos": f"{_P}ignore_eos",
    "response.top_n": f"{_P}logprobs",
    "response.prompt_logprobs": f"{_P}prompt_logprobs",
    "grammar": f"{_P}constraint",
    "grammar.choice": f"{_P}choice",
    "grammar.choice.choices": f"{_P}choice.choices",
    **{f"grammar.{ours}": f"{_P}{theirs}" for theirs, ours in _CONSTRAINTS.items()},
    **{f"sampling.{name}": f"{_P}{name}" for name in ("temperature", "seed", "logit_bias", *_ZERO_UNSET)},
}


def generate_request(proto: Any) -> Any:
    """Our GenerateRequest. Raises: InvalidArgument."""
    for name, why in _ABSENT.items():
        value = getattr(proto, name)
        given = bool(value) if name == "extra_mm_inputs" else proto.HasField(name)
        if given:
            raise InvalidArgument(name, str(value)[: requests.SHOWN], f"absent: {why}")
    ours = decode_pb2.GenerateRequest(request_id=proto.request_id)
    kind = proto.WhichOneof("input")
    if kind == "text":
        ours.text = proto.text
    elif kind == "tokenized":
        ours.token_ids.ids.extend(proto.tokenized.input_ids)
    if proto.HasField("data_parallel_rank"):
        ours.dp_rank = _unsigned("data_parallel_rank", proto.data_parallel_rank)
    if proto.HasField(kv_transfer.FIELD):
        kv_transfer.set_handoff(ours, proto.kv_transfer_params_json)
    params = proto.sampling_params
    _set_sampling(ours.sampling, params)
    _set_stopping(ours.stopping, params)
    _set_response(ours.response, params)
    _set_grammar(ours, params)
    return ours


def check_profile(proto: Any) -> None:
    """Options of a profile that are not ours to choose. Raises: InvalidArgument."""
    for name in ("output_dir", "start_step", "with_stack", "record_shapes"):
        if proto.HasField(name):
            value = str(getattr(proto, name))[: requests.SHOWN]
            raise InvalidArgument(name, value, "absent: the server's [profile] options decide")
    if proto.activities:
        raise InvalidArgument("activities", list(proto.activities)[:2], "absent: all are recorded")
    if proto.profile_by_stage:
        raise InvalidArgument("profile_by_stage", True, "false: steps mix prompts and outputs")


def check_long_message(data: bytes, model: ServedModel, limits: Limits) -> None:
    """Counts the elements of a GenerateRequest before it is decoded.

    Raises: InvalidArgument, ContextLengthExceeded.
    """
    ours = requests.most_elements(model, limits)
    most = {NAMES[name]: limit for name, limit in ours.items() if name in NAMES}
    found = field_counts(data, pb.GenerateRequest.DESCRIPTOR, most)
    ids = found[NAMES["token_ids.ids"]]
    if ids > limits.max_context:
        raise ContextLengthExceeded(f"prompt of {ids} tokens: at most {limits.max_context}")
    for name, limit in most.items():
        if found[name] > limit:
            raise InvalidArgument(name, f"{found[name]} elements", f"at most {limit}")


def _set_sampling(ours: Any, params: Any) -> None:
    if params.HasField("temperature"):
        ours.temperature = _decimal(params.temperature)
    for name in _ZERO_UNSET:
        if value := getattr(params, name):
            setattr(ours, name, value if name == "top_k" else _decimal(value))
    if params.n:
        ours.num_sequences = params.n
    if params.HasField("seed"):
        ours.seed = params.seed % 2**64
    for token, bias in params.logit_bias.items():
        ours.logit_bias[_unsigned(f"{_P}logit_bias", token)] = _decimal(bias)
    if params.HasField("truncate_prompt_tokens"):
        allowed = "absent: shorten the prompt before you send it"
        raise InvalidArgument(f"{_P}truncate_prompt_tokens", params.truncate_prompt_tokens, allowed)


def _set_stopping(ours: Any, params: Any) -> None:
    if params.HasField("max_tokens"):
        ours.max_new_tokens = params.max_tokens
    ours.min_new_tokens = params.min_tokens
    ours.stop_strings.extend(params.stop)
    ours.stop_token_ids.extend(params.stop_token_ids)
    ours.include_stop = params.include_stop_str_in_output
    ours.ignore_eos = params.ignore_eos


def _set_response(ours: Any, params: Any) -> None:
    """Token ids only: the caller decodes them. Stop strings are found all the same."""
    ours.output_text = False
    if params.HasField("logprobs"):
        ours.output_logprobs = True
        ours.top_n = _unsigned(f"{_P}logprobs", params.logprobs)
    if params.HasField("prompt_logprobs"):
        ours.prompt_logprobs = _unsigned(f"{_P}prompt_logprobs", params.prompt_logprobs)


def _set_grammar(ours: Any, params: Any) -> None:
    kind = params.WhichOneof("constraint")
    if kind == "choice":
        ours.grammar.choice.choices.extend(params.choice.choices)
        ours.grammar.choice.SetInParent()
    elif kind is not None:
        setattr(ours.grammar, _CONSTRAINTS[kind], getattr(params, kind))


def _unsigned(name: str, value: int) -> int:
    if value < 0:
        raise InvalidArgument(name, value, "at least 0")
    return value


def _decimal(value: float) -> float:
    """The shortest decimal that travels as this float32: 0.7, not 0.699999988."""
    return float(str(np.float32(value)))
