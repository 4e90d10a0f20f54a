"""Chat prompts: rendered by the server with the model's template."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ep_server.frontend.served_model import ServedModel
from ep_server.records import Request
from ep_server.text.chat_template import ChatTemplate
from ep_server.v1 import decode_pb2
from tests.support.chat_templates import CHATML_WITH_TOOLS
from tests.support.frontend import MODEL, NO_TOKENIZER, Code, Served, failure, rest, serving, trailers

TEMPLATE = ChatTemplate({"default": CHATML_WITH_TOOLS}, {})
CHATS: ServedModel = dataclasses.replace(MODEL, chat_template=TEMPLATE)
HELLO = {"role": "user", "content": "hello"}


def ask(served: Served, messages: list[dict[str, Any]], **chat: Any) -> Any:
    prompt = decode_pb2.Chat(messages=[decode_pb2.ChatMessage(**each) for each in messages], **chat)
    stopping = decode_pb2.Stopping(max_new_tokens=1)
    return served.client.decode.Generate(decode_pb2.GenerateRequest(chat=prompt, stopping=stopping))


def last(served: Served) -> Request:
    return served.ranks.requests[max(served.ranks.requests)]


async def test_prompt_is_the_rendered_chat() -> None:
    calls = '{"tool_calls": [{"function": {"arguments": {"city": "Z\\u00fcrich"}}}]}'
    messages = [HELLO, {"role": "assistant", "fields": calls}, {"role": "tool", "content": "sunny"}]
    expected = (
        '<|im_start|>system\n# Tools\n<tools>\n{"a": "é"}\n</tools><|im_end|>\n'
        "<|im_start|>user\nhello<|im_end|>\n"
        '<|im_start|>assistant\n\n<tool_call>{"city": "Zürich"}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    async with serving(model=CHATS) as served:
        given = {"tools": '[{"a": "é"}]', "variables": '{"enable_thinking": false}'}
        events = await rest(ask(served, messages, **given))
        assert events[-1].finished.usage.prompt_tokens == len(expected.encode())
        (request,) = served.ranks.requests.values()
        assert bytes(request.prompt_ids) == expected.encode()
        await rest(ask(served, [HELLO], add_generation_prompt=False))
        assert bytes(last(served).prompt_ids) == b"<|im_start|>user\nhello<|im_end|>\n"
        await rest(ask(served, [{"role": "user", "content": "x" * 10_000}]))  # outside the event loop
        assert len(last(served).prompt_ids) > 10_000
        assert (await served.client.model_info()).has_chat_template


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("messages", "chat", "field", "allowed"),
    [
        ([], {}, "chat.messages", "at least one message"),
        ([HELLO] * 2049, {}, "chat.messages", "at most 2048 messages"),
        ([HELLO, {"content": "x"}], {}, "chat.messages[1].role", "who speaks"),
        ([HELLO | {"fields": "[]"}], {}, "chat.messages[0].fields", "a JSON object"),
        ([HELLO | {"fields": '{"role": "system"}'}], {}, "chat.messages[0].fields", "without role"),
        ([HELLO], {"tools": "{}"}, "chat.tools", "a JSON array"),
        ([HELLO], {"tools": DEEP}, "chat.tools", "a JSON array"),
        ([HELLO], {"tools": "[NaN]"}, "chat.tools", "a JSON array"),
        ([HELLO], {"variables": "{"}, "chat.variables", "a JSON object"),
        ([HELLO], {"variables": '{"messages": []}'}, "chat.variables", "without messages"),
        ([HELLO | {"fields": '{"tool_calls": 7}'}], {}, "chat.messages", "model's chat template accepts"),
        ([HELLO | {"fields": '{"tool_calls": [1]}'}], {}, "chat.messages", "model's chat template accepts"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_bad_chats_name_their_field(messages: Any, chat: Any, field: str, allowed: str) -> None:
    async with serving(model=CHATS) as served:
        error = await failure(ask(served, messages, **chat))
        assert error.code() is Code.INVALID_ARGUMENT, error.details()
        assert trailers(error)["epserver-field"] == field
        assert allowed in str(error.details())
        assert len(str(error.details())) < 500


async def test_long_chats_and_models_without_a_template() -> None:
    async with serving(model=dataclasses.replace(CHATS, max_context=32)) as served:
        error = await failure(ask(served, [{"role": "user", "content": "x" * 2048}]))
        assert error.code() is Code.OUT_OF_RANGE and "chat of 2" in str(error.details())
    for model, missing in ((MODEL, "chat template"), (NO_TOKENIZER, "tokenizer")):
        async with serving(model=model) as served:
            error = await failure(ask(served, [HELLO]))
            assert trailers(error)["epserver-field"] == "chat"
            assert f"this model has no {missing}" in str(error.details())
