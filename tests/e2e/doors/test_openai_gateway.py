"""OpenAI's client through the SMG gateway against a server process: README's way to an OpenAI endpoint."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from ep_server.v1 import control_pb2, decode_pb2
from tests.support.doors.openai_gateway import Gateway, chat_checkpoint, gateway
from tests.support.frontend import WAIT
from tests.support.structured import DEMO

pytestmark = pytest.mark.asyncio(loop_scope="module")

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
ASKED: Any = [{"role": "user", "content": "12+34"}]
SUM = "  46"
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "openai-endpoint.md"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def demo(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """The demo model, which adds."""
    async with gateway(DEMO, tmp_path_factory.mktemp("demo")) as each:
        yield each


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def random(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """The shape of the demo model; its tokens are bytes and its weights random."""
    folder = tmp_path_factory.mktemp("random")
    async with gateway(chat_checkpoint(folder), folder, "--load-format", "dummy", "--ranks", "2") as each:
        yield each


async def test_chat(demo: Gateway) -> None:
    chat = demo.openai.chat.completions
    (choice,) = (answer := await chat.create(model="demo", messages=ASKED, temperature=0)).choices
    assert (choice.message.content, choice.finish_reason) == (SUM, "stop")
    assert answer.usage is not None and answer.usage.completion_tokens == 5
    parts, usage = [], None
    options: Any = {"include_usage": True}
    stream = await chat.create(
        model="demo", messages=ASKED, temperature=0, stream=True, stream_options=options
    )
    async for part in stream:
        parts += [choice.delta.content or "" for choice in part.choices]
        usage = part.usage or usage
    assert "".join(parts) == SUM and usage is not None
    assert usage.model_dump() == answer.usage.model_dump()


async def test_completions(demo: Gateway) -> None:
    fields: Any = {"model": "demo", "prompt": "12+34=", "max_tokens": 8, "temperature": 0}
    answer = await demo.openai.completions.create(**fields)
    stream = await demo.openai.completions.create(**fields, stream=True)
    texts = [choice.text async for part in stream for choice in part.choices]
    assert answer.choices[0].text == "".join(texts) == SUM
    shorter = await demo.openai.completions.create(**fields | {"max_tokens": 3})
    assert (shorter.choices[0].text, shorter.choices[0].finish_reason) == ("  4", "length")
    stopped = await demo.openai.completions.create(**fields, stop=["46"])
    assert "46" not in stopped.choices[0].text and stopped.choices[0].finish_reason == "stop"


async def test_logprobs_and_several_choices(demo: Gateway) -> None:
    chat = demo.openai.chat.completions
    answer = await chat.create(
        model="demo", messages=ASKED, temperature=0, n=2, logprobs=True, top_logprobs=2
    )
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert "".join(token.token for token in choice.logprobs.content) == SUM
        for token in choice.logprobs.content:
            assert token.top_logprobs[0].token == token.token and len(token.top_logprobs) == 2


async def test_the_example_of_the_page_runs(demo: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    code = code.replace("http://127.0.0.1:8000/v1", str(demo.openai.base_url)).replace("demo_model", "demo")
    await asyncio.to_thread(exec, code + "\nclient.close()", {})
    assert capsys.readouterr().out == "  42\n"


async def test_errors_are_openais(demo: Gateway) -> None:
    import openai

    chat = demo.openai.chat.completions
    with pytest.raises(openai.BadRequestError, match="at most 2048 together"):
        await chat.create(model="demo", messages=ASKED, max_tokens=100_000)
    with pytest.raises(openai.NotFoundError):
        await chat.create(model="other", messages=ASKED)


async def test_the_seed_gives_the_text_of_decode(random: Gateway) -> None:
    grammar = decode_pb2.Grammar(regex="[a-z]{24}")
    for seed in (3, 4):
        ours = await random.server.complete("abc", seed=seed, temperature=0.7, grammar=grammar)
        theirs = await random.openai.completions.create(
            model="demo", prompt="abc", seed=seed, temperature=0.7, extra_body={"regex": "[a-z]{24}"}
        )
        assert theirs.choices[0].text == ours.text and len(ours.text) == 24


async def valid_json(random: Gateway, seed: int) -> None:
    schema: Any = {"name": "weather", "schema": WEATHER, "strict": True}
    answer = await random.openai.chat.completions.create(
        model="demo",
        messages=ASKED,
        temperature=1,
        seed=seed,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), WEATHER)


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.slow)])
async def test_json_validates_whatever_the_model_wants(random: Gateway, count: int) -> None:
    await asyncio.gather(*(valid_json(random, seed) for seed in range(count)))


async def test_json_of_the_demo_model(demo: Gateway) -> None:
    """It has digits and signs alone, so its JSON is numbers."""
    schema: Any = {"name": "sum", "schema": {"type": "integer", "minimum": 100, "maximum": 120}}
    for seed in range(4):
        answer = await demo.openai.chat.completions.create(
            model="demo",
            messages=ASKED,
            temperature=1,
            seed=seed,
            response_format={"type": "json_schema", "json_schema": schema},
        )
        assert 100 <= json.loads(answer.choices[0].message.content or "") <= 120


NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(("stream", "choice"), [(False, NAMED), (True, NAMED), (False, "required")])
async def test_tool_calls(random: Gateway, stream: bool, choice: Any) -> None:
    fields: Any = {"model": "demo", "messages": ASKED, "temperature": 1, "seed": 7, "tools": TOOLS}
    fields["tool_choice"] = choice
    if stream:
        name, arguments = "", ""
        async for part in await random.openai.chat.completions.create(**fields, stream=True):
            for call in part.choices[0].delta.tool_calls or [] if part.choices else []:
                name += call.function.name or ""
                arguments += call.function.arguments or ""
        calls = [(name, arguments)]
    else:
        answer = await random.openai.chat.completions.create(**fields)
        found = answer.choices[0].message.tool_calls
        calls = [(call.function.name, call.function.arguments) for call in found]
    assert calls and {name for name, _ in calls} == {"weather"}
    for _, arguments in calls:
        jsonschema.validate(json.loads(arguments), WEATHER)


async def test_closing_a_stream_frees_its_blocks(random: Gateway) -> None:
    async with asyncio.timeout(2 * WAIT):
        while not await ends_early(random):  # again if all was read before the gateway heard of the end
            pass


async def ends_early(random: Gateway) -> bool:
    """Closes a stream. Returns: whether it did not run to its end."""
    before = (await random.server.control.GetLoads(control_pb2.GetLoadsRequest())).ranks[0].steps
    tokens = 1500
    fields: Any = {"model": "demo", "prompt": "abc", "max_tokens": tokens, "extra_body": {"ignore_eos": True}}
    stream = await random.openai.completions.create(**fields, stream=True)
    async for _ in stream:
        break
    await stream.close()
    async with asyncio.timeout(WAIT):
        while True:
            loads = await random.server.control.GetLoads(control_pb2.GetLoadsRequest())
            if loads.in_flight == 0 and all(rank.running == 0 for rank in loads.ranks):
                break
            await asyncio.sleep(0.02)
    assert [rank.kv_blocks_used for rank in loads.ranks] == [0, 0]
    return bool(loads.ranks[0].steps - before < tokens)
