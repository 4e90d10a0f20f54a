"""tritonclient against ranks of the demo model: the text is that of Decode, and grammars hold."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tritonclient.grpc import aio

from ep_server.client import AsyncClient
from ep_server.config import Config
from ep_server.frontend.served_model import ServedModel
from ep_server.frontend.server import Server
from ep_server.ranks.launcher import RankProcesses
from tests.support.doors.oip import outputs, streamed, tensors
from tests.support.structured import DEMO

ROOT = Path(__file__).parents[4]
pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Demo:
    """A server and two clients of it."""

    server: Server
    ours: AsyncClient
    client: aio.InferenceServerClient


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def demo() -> AsyncIterator[Demo]:
    values = {
        "grpc.port": 0,
        "model.path": str(DEMO),
        "model.name": "demo_model",  # as the page calls it
        "parallel.ranks": 2,
        "parallel.threads_per_rank": 1,
        "scheduler.kv_blocks": 256,
    }
    config = Config.from_values(values)
    server = Server(config, ServedModel.load(config.model), RankProcesses(config))
    await server.start(lambda *_: None)
    try:
        async with AsyncClient(server.address) as ours, aio.InferenceServerClient(server.address) as client:
            yield Demo(server, ours, client)
    finally:
        await server.drain()
        await server.stop()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_seed_gives_the_text_of_decode(demo: Demo, temperature: float) -> None:
    fields = {"seed": 21, "temperature": temperature, "ignore_eos": True}
    expected = await demo.ours.complete("12+34=", max_new_tokens=12, **fields)
    parameters = fields | {"max_tokens": 12}
    plain = tensors(text_input="12+34=", exclude_input_in_output=True, sampling_parameters=parameters)
    assert outputs(await demo.client.infer("demo_model", plain))["text_output"] == [expected.text]
    inputs = tensors(text_input="12+34=", stream=True, sampling_parameters=parameters)
    pairs = await streamed(
        demo.client, *[{"inputs": inputs, "request_id": str(i)} for i in range(3)], model="demo_model"
    )
    texts: dict[str, str] = {}
    for result, error in pairs:
        assert error is None
        name = result.get_response().id
        texts[name] = texts.get(name, "") + outputs(result)["text_output"][0]
    assert texts == {str(i): expected.text for i in range(3)}


async def test_a_grammar_holds(demo: Demo) -> None:
    async def drawn(seed: int) -> Any:
        parameters = {"seed": seed, "max_tokens": 30, "structured_outputs": {"regex": "[0-9]{3}=[0-9]{2}"}}
        inputs = tensors(text_input="1+1=", exclude_input_in_output=True, sampling_parameters=parameters)
        return outputs(await demo.client.infer("demo_model", inputs))["text_output"][0]

    for seed in range(4):
        assert re.fullmatch("[0-9]{3}=[0-9]{2}", await drawn(seed))


async def test_the_examples_of_the_page_run(demo: Demo, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "how-to" / "triton-clients.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    await asyncio.to_thread(exec, code.replace("127.0.0.1:50051", demo.server.address), {})
    first, *streamed, tokens, digits = capsys.readouterr().out.splitlines()
    assert first.strip() == "42"
    assert sorted("".join(streamed).replace(" ", "")) == sorted("42" + "15")
    assert re.fullmatch(r"\[[0-9, ]+\] (stop|length)", tokens) and re.fullmatch("[0-9]{1,3}", digits)
