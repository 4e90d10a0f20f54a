"""The SMG gateway in front of a server of its own, both as processes, for OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ep_server.client import AsyncClient
from tests.support.ports import free_port
from tests.support.ranks.zygote import Forked, start_server
from tests.support.structured import byte_checkpoint

if TYPE_CHECKING:  # a second of CPU time for each process that collects the tests
    import openai

START_SECONDS = 120.0
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
)


@dataclass
class Gateway:
    """A client of the gateway, and one of the server behind it."""

    openai: openai.AsyncOpenAI
    server: AsyncClient


def chat_checkpoint(folder: Path) -> Path:
    """byte_checkpoint() with a chat template. Serve it with model.load_format = dummy."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return byte_checkpoint(folder)


@asynccontextmanager
async def gateway(model: Path, folder: Path, *options: str) -> AsyncIterator[Gateway]:
    """options: of `ep-server serve`. folder: for the logs."""
    async with (
        _served(model, folder / "server.log", *options) as address,
        _in_front(folder, "--worker-urls", f"grpc://{address}") as client,
        AsyncClient(address) as own,
    ):
        yield Gateway(client, own)


@asynccontextmanager
async def pd_gateway(model: Path, folder: Path, *options: str) -> AsyncIterator[tuple[Gateway, AsyncClient]]:
    """The gateway in its prefill/decode mode, before two servers. Yields also a client of the prefill server.

    Gateway.server is the decode server.
    """
    async with (
        _served(model, folder / "prefill.log", "--handoff-role", "prefill", *options) as prefill,
        _served(model, folder / "decode.log", "--handoff-role", "decode", *options) as decode,
    ):
        mode = ("--pd-disaggregation", "--prefill", f"grpc://{prefill}", "--decode", f"grpc://{decode}")
        async with (
            _in_front(folder, *mode) as client,
            AsyncClient(decode) as own,
            AsyncClient(prefill) as other,
        ):
            yield Gateway(client, own), other


@asynccontextmanager
async def _served(model: Path, log: Path, *options: str) -> AsyncIterator[str]:
    """The address of a server."""
    serve = ["serve", "--model", str(model), "--model-name", "demo", "--port", "0"]
    serve += ["--metrics-port", "0", *options]
    with _running(partial(start_server, serve), log):
        found = await _until(lambda: re.search(r"serving demo on (\S+:\d+),", log.read_text()))
        yield found[1]


@asynccontextmanager
async def _in_front(folder: Path, *options: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a gateway. options: of `smg launch`."""
    import openai

    port = free_port()
    smg = [sys.executable, "-m", "smg", "launch", *options, "--port", str(port)]
    smg += ["--prometheus-port", str(free_port()), "--log-level", "warn"]

    def start(output: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(smg, stdout=output, stderr=output, cwd=folder)

    with _running(start, folder / "gateway.log", signal.SIGKILL):  # it would take five seconds to end
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            await _ready(client)
            yield client


@contextmanager
def _running(
    start: Callable[[int], Forked | subprocess.Popen[bytes]],
    log: Path,
    end: signal.Signals = signal.SIGTERM,
) -> Iterator[Path]:
    """start: of a process that writes to a descriptor."""
    with log.open("wb") as output:
        process = start(output.fileno())
    try:
        yield log
        assert process.poll() is None, log.read_text()[-2000:]
    finally:
        process.send_signal(end)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _until(found: Callable[[], Any]) -> Any:
    end = time.monotonic() + START_SECONDS
    while (value := found()) is None:
        assert time.monotonic() < end, "not within START_SECONDS"
        await asyncio.sleep(0.05)
    return value


async def _ready(client: openai.AsyncOpenAI) -> None:
    """Until the gateway knows the server's model and its tokenizer."""
    import openai

    end = time.monotonic() + START_SECONDS
    while True:
        try:
            await client.completions.create(model="demo", prompt="1+1=", max_tokens=1)
            return
        except (openai.APIConnectionError, openai.APIStatusError):
            assert time.monotonic() < end, "the gateway does not answer"
            await asyncio.sleep(0.1)
