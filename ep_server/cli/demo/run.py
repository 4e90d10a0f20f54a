"""`ep-server demo`: serves the demo model on real rank processes, asks it sums over gRPC, shows latencies.

Builds the server that `ep-server serve` builds and talks to it through the public client, like any caller.
A wrong answer, or a server that does not come up, is a failure: exit status 1. Units: seconds, tokens.
"""

from __future__ import annotations

import asyncio
import random
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from ep_server.cli.app import App, assemble, require_open_files
from ep_server.cli.demo.report import Answer, Output, answer_line, latency_table, speed_line
from ep_server.cli.demo.sums import Sum, draw_held_out
from ep_server.cli.progress import Bars
from ep_server.client import AsyncClient
from ep_server.config import Config
from ep_server.errors import StartupError
from ep_server.frontend.server import Server
from ep_server.observability.metrics import PREFIX

DEMO_MODEL = Path(__file__).parents[2] / "assets" / "demo_model"
MAX_NEW_TOKENS = 8  # an answer has five, its end included
ANSWER_SECONDS = 60.0  # deadline of one answer
REPORT_SECONDS = 10.0  # ranks report what they measured twice a second


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What `ep-server demo` may be told. seed None draws one. keep: serve on until Ctrl-C."""

    ranks: int = 4
    seed: int | None = None
    questions: int = 20
    keep: bool = False
    model: Path = DEMO_MODEL


def main(options: DemoOptions | None = None, console: Console | None = None) -> int:
    """Runs the demo.

    Returns: exit status; 0 if every sum is right and the server stopped cleanly, 1 if not.
    Raises: StartupError; grpc.RpcError where a request fails.
    """
    options = options or DemoOptions()
    require_open_files(options.ranks)
    return uvloop.run(_demo(options, console or Output()))


async def _demo(options: DemoOptions, console: Console) -> int:
    config = Config.load(
        flags={
            "model.path": str(options.model),
            "parallel.ranks": options.ranks,
            "grpc.port": 0,
            "metrics.port": 0,
        },
        environ={},  # the same demo everywhere
    )
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    async with assemble(config) as app:
        model = app.model
        console.print(
            f"{model.name}: {model.architecture}, {model.num_layers} layers, {model.num_experts} experts, "
            f"{model.experts_per_token} per token",
            soft_wrap=True,
        )
        console.print(f"{options.ranks} ranks over shared memory; {options.questions} sums, seed {seed}")
        async with _running(app.server, console) as life:
            console.print(f"gRPC at {app.server.address}, metrics at {app.metrics_url}", soft_wrap=True)
            answers = await _show(app, draw_held_out(seed, options.questions), console)
            if options.keep:
                console.print("serving until Ctrl-C")
                await asyncio.wait((life,))
    clean = life.result() == 0
    console.print("stopped cleanly" if clean else "a rank was lost")
    return 0 if clean and all(answer.right for answer in answers) else 1


async def _show(app: App, sums: list[Sum], console: Console) -> list[Answer]:
    """Asks, and prints what was answered and what was measured."""
    async with AsyncClient(app.server.address) as client:
        start = time.monotonic()
        answers = await _ask(client, sums, console)
        console.print(speed_line(answers, time.monotonic() - start))
        console.print(latency_table(await _measured(client)))
    series = await asyncio.to_thread(_count_series, app.metrics_url)
    console.print(f"metrics page: {app.metrics_url} ({series} series)", soft_wrap=True)
    return answers


@asynccontextmanager
async def _running(server: Server, console: Console) -> AsyncIterator[asyncio.Task[int]]:
    """Runs the server from warm-up to a clean stop. Yields its task. Raises: StartupError."""
    serving = asyncio.Event()
    with Bars(console, console.print) as bars:
        life = asyncio.create_task(server.run(bars.loading, serving.set))
        came_up = asyncio.create_task(serving.wait())
        await asyncio.wait((life, came_up), return_when=asyncio.FIRST_COMPLETED)
        came_up.cancel()
    if life.done():
        life.result()
        raise StartupError("interrupted while loading")
    try:
        yield life
    finally:
        if not life.done():
            server.ask_to_stop()
        await life


async def _ask(client: AsyncClient, sums: list[Sum], console: Console) -> list[Answer]:
    """Asks all at once; prints each answer as it comes."""
    answers: list[Answer] = []
    with Bars(console, console.print) as bars:

        async def ask(each: Sum) -> None:
            output = await client.complete(
                each.prompt, max_new_tokens=MAX_NEW_TOKENS, temperature=0.0, timeout=ANSWER_SECONDS
            )
            answers.append(Answer(each, output.text, len(output.token_ids)))
            console.print(answer_line(answers[-1]))
            bars.show("sums", len(answers), len(sums))

        await asyncio.gather(*map(ask, sums))
    return answers


async def _measured(client: AsyncClient) -> Any:
    """GetEpStateResponse once every rank reported that it has nothing left to do."""
    try:
        async with asyncio.timeout(REPORT_SECONDS):
            while True:
                ranks = (await client.loads()).ranks
                if all(rank.steps and not rank.running and not rank.waiting for rank in ranks):
                    return await client.ep_state()
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise StartupError(f"no rank reported its latencies within {REPORT_SECONDS:g} s") from None


def _count_series(url: str) -> int:
    with urllib.request.urlopen(url, timeout=REPORT_SECONDS) as page:
        return sum(line.startswith(PREFIX.encode()) for line in page)
