"""What the fuzzer sends: every call of every public service, from valid requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import strategies as st

from ep_server.frontend.doors import oip, vllm_engine
from ep_server.frontend.doors.oip.sampling import KEYS
from ep_server.frontend.doors.oip.tensors import FLAGS, OUTPUTS
from ep_server.frontend.doors.vllm_engine.protocol import pb as vllm
from ep_server.v1 import control_pb2, decode_pb2
from tests.support.doors.oip import message, typed

TEXTS = (
    "text_input",
    "input_ids",
    "stream",
    "sampling_parameters",
    "output_ids",
    "BYTES",
    "INT64",
    "temperature",
)
# Of a chat prompt: reads every variable that a caller can set.
TEMPLATE = """\
{%- if tools %}{% for tool in tools %}{{ tool.name }}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}
{%- if message.role == "user" and not message.content %}{{ raise_exception("empty") }}{% endif %}
{{- message.role }}: {{ (message.content or "") | trim }}
{%- for call in message.tool_calls or [] %}{{ call.name + call.arguments | tojson }}{% endfor %}
{%- endfor %}
{%- if add_generation_prompt and not thinking %}assistant:{% endif %}"""
ENDLESS = ("Watch", "SubscribeKvEvents")  # calls that the caller ends
MODEL = "fake"


@dataclass(frozen=True, slots=True, repr=False)
class Call:
    """One method and valid requests of it."""

    path: str
    asks_many: bool
    answers_many: bool
    seeds: Sequence[Any]
    response: Any
    endless: bool

    def __repr__(self) -> str:
        return self.path


def _seeds() -> dict[str, list[Any]]:
    """By full name of the request's message."""
    parameters = {"max_tokens": 3, "stop": ["zz"], "logit_bias": {"5": 1.0}, "n": 2, "logprobs": 1}
    inferred = [
        message(MODEL, text_input="ab", sampling_parameters=parameters, return_logprobs=True),
        message(MODEL, input_ids=[1, 2, 3], stream=True, sampling_parameters={"max_tokens": 3}),
    ]
    asked = vllm.GenerateRequest(
        tokenized=vllm.TokenizedInput(original_text="ab", input_ids=[1, 2]), stream=True
    )
    asked.sampling_params.max_tokens = 3
    asked.sampling_params.stop.append("zz")
    of_text = vllm.GenerateRequest(text="ab")
    of_text.sampling_params.CopyFrom(asked.sampling_params)
    of_text.sampling_params.n = 2
    given = decode_pb2.GenerateRequest(model=MODEL, text="ab")
    given.stopping.max_new_tokens = 3
    given.stopping.stop_strings.append("zz")
    given.sampling.temperature = 0.5
    ids = decode_pb2.GenerateRequest(token_ids=decode_pb2.TokenIds(ids=[1, 2, 3]))
    ids.response.prompt_logprobs = 1
    chat = decode_pb2.GenerateRequest()
    chat.chat.messages.add(role="user", content="ab")
    chat.chat.messages.add(role="assistant", fields='{"tool_calls": [{"name": "f", "arguments": {}}]}')
    chat.chat.tools, chat.chat.variables = '[{"name": "f"}]', '{"thinking": false}'
    chat.stopping.max_new_tokens = 3
    return {
        "inference.ModelInferRequest": [*inferred, *map(typed, inferred)],
        "ep_server.v1.GenerateRequest": [given, ids, chat],
        "vllm.grpc.engine.GenerateRequest": [asked, of_text],
        "ep_server.v1.AbortRequest": [control_pb2.AbortRequest(request_ids=["a"])],
    }


def calls() -> list[Call]:
    """All of them."""
    seeds = _seeds()
    services = (
        decode_pb2.DESCRIPTOR.services_by_name["Decode"],
        control_pb2.DESCRIPTOR.services_by_name["Control"],
        oip.SERVICE,
        vllm_engine.SERVICE,
        health_pb2.DESCRIPTOR.services_by_name["Health"],
        reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
    )
    return [
        Call(
            f"/{service.full_name}/{method.name}",
            method.client_streaming,
            method.server_streaming,
            seeds.get(method.input_type.full_name, [GetMessageClass(method.input_type)()]),
            GetMessageClass(method.output_type),
            method.name in ENDLESS,
        )
        for service in services
        for method in service.methods
    ]


VALUES = (
    0,
    1,
    -1,
    3,
    2**64,
    0.5,
    1e400,
    "1",
    "x",
    "",
    "true",
    [],
    {},
    None,
    True,
    ["x"] * 20,
    [1, 2],
    {"5": 1},
)
GRAMMARS = (
    {"regex": "a+"},
    {"regex": "("},
    {"json": "{"},
    {"json_object": True},
    {"choice": ["a", 1]},
    {"x": 1},
)


@st.composite
def inferences(draw: st.DrawFn) -> bytes:
    """A well-formed ModelInferRequest with any sampling parameters, as JSON or one by one."""
    grammar = st.sampled_from(GRAMMARS) if draw(st.integers(0, 9)) == 9 else st.none()
    names = st.sampled_from([*KEYS, "unknown", "\ud800ü\x00"])
    values = draw(st.dictionaries(names, st.sampled_from(VALUES), max_size=3)) | {
        "max_tokens": draw(st.sampled_from((1, 2, 9)))
    }
    prompt = draw(st.sampled_from([{"text_input": "ab"}, {"text_input": "ü" * 40}, {"input_ids": [1, 2, 3]}]))
    values["guided_decoding"] = draw(grammar)
    flags = dict.fromkeys(draw(st.sets(st.sampled_from(["stream", *FLAGS]))), True)
    request = message(MODEL, **prompt, **flags, sampling_parameters=values)
    if draw(st.booleans()):
        request = typed(request)
    for name in draw(st.sets(st.sampled_from([*OUTPUTS]), max_size=2)):
        request.outputs.add(name=name)
    data: bytes = request.SerializeToString()
    return data
