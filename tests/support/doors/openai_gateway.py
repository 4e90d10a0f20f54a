"""The SMG gateway in front of a server of its own, both as processes, for OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from ep_server.client import AsyncClient
from tests.support.structured import byte_checkpoint

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
    serve = ["ep_server", "serve", "--model", str(model), "--model-name", "demo", "--port", "0"]
    serve += ["--metrics-port", "0", *options]
    with _running(serve, folder / "server.log") as log:
        found = await _until(lambda: re.search(r"serving demo on (\S+:\d+),", log.read_text()))
        address, port = found[1], _free_port()
        smg = ["smg", "launch", "--worker-urls", f"grpc://{address}", "--port", str(port)]
        smg += ["--prometheus-port", str(_free_port()), "--log-level", "warn"]
        with _running(smg, folder / "gateway.log", signal.SIGKILL):  # it would take five seconds to end
            url = f"http://127.0.0.1:{port}/v1"
            async with (
                openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client,
                AsyncClient(address) as own,
            ):
                await _ready(client)
                yield Gateway(client, own)


@contextmanager
def _running(arguments: list[str], log: Path, end: signal.Signals = signal.SIGTERM) -> Iterator[Path]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdout=output, stderr=subprocess.STDOUT, cwd=log.parent
        )
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
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            await client.completions.create(model="demo", prompt="1+1=", max_tokens=1)
            return
        except (openai.APIConnectionError, openai.APIStatusError):
            assert time.monotonic() < end, "the gateway does not answer"
            await asyncio.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
