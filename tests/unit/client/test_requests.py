"""Requests from flat fields."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from ep_server.client import chat_prompt, generate_request
from ep_server.errors import InvalidArgument
from ep_server.v1 import decode_pb2 as pb

SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}


def test_fields_reach_their_message() -> None:
    request = generate_request(
        "hi", top_p=0.5, stop_strings=["x"], prompt_logprobs=0, cache_salt="me", seed=None
    )
    assert request == pb.GenerateRequest(
        text="hi",
        sampling=pb.Sampling(top_p=0.5),
        stopping=pb.Stopping(stop_strings=["x"]),
        response=pb.ResponseOptions(prompt_logprobs=0),
        cache_salt="me",
    )
    assert generate_request([1, 2]) == pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]))


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"json_schema": SCHEMA}, pb.Grammar(json_schema=json.dumps(SCHEMA, ensure_ascii=False))),
        ({"json_schema": "{}"}, pb.Grammar(json_schema="{}")),
        ({"json_object": True}, pb.Grammar(json_object=True)),
        ({"regex": "[0-9]+"}, pb.Grammar(regex="[0-9]+")),
        ({"choice": ["yes", "no"]}, pb.Grammar(choice=pb.Choices(choices=["yes", "no"]))),
        ({"choice": []}, pb.Grammar(choice=pb.Choices())),
        ({"ebnf": 'root ::= "a"'}, pb.Grammar(ebnf='root ::= "a"')),
        ({"structural_tag": {"type": "x"}}, pb.Grammar(structural_tag='{"type": "x"}')),
    ],
    ids=str,
)
def test_grammars(fields: dict[str, Any], grammar: Any) -> None:
    request = generate_request([1], **fields)
    assert request.grammar == grammar and request.HasField("grammar")


def test_chat_messages_keep_their_further_fields() -> None:
    calls = [{"function": {"name": "f", "arguments": {"é": 1}}}]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    chat = generate_request(chat_prompt(messages, tools=[{"a": 1}], variables={"thinking": False})).chat
    first, second = chat.messages
    assert (first.role, first.content, first.fields) == ("user", "hi", "")
    assert not second.HasField("content") and json.loads(second.fields) == {"tool_calls": calls}
    assert (chat.tools, chat.variables, chat.add_generation_prompt) == (
        '[{"a": 1}]',
        '{"thinking": false}',
        True,
    )


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"seed": -1}, "seed"),
        ({"json_schema": {"a": math.nan}}, "json_schema"),
        ({"json_schema": {"a": {1}}}, "json_schema"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"choice": "yes"}, "choices"),
    ],
    ids=str,
)
def test_values_that_no_field_carries(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        generate_request([1], **fields)
    assert caught.value.field == name


def test_chat_of_parts_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"chat.messages\[0\].content"):
        chat_prompt([{"role": "user", "content": [{"type": "image"}]}])
    with pytest.raises(TypeError, match="'no_such_field' is not a field"):
        generate_request([1], no_such_field=1)
