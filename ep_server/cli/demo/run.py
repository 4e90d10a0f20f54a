"""`ep-server demo`: serves the demo model on rank processes, asks it sums over gRPC and prints latencies.

It starts the same server as `ep-server serve` and uses the public client. The exit code is 1 after a wrong
answer or a failed start. Units: seconds, tokens.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ep_server.cli.app import App, assemble, require_open_files
from ep_server.cli.demo.sums import Sum, draw_held_out, parse_answer
from ep_server.cli.progress import Bars
from ep_server.client import AsyncClient
from ep_server.config import Config
from ep_server.errors import StartupError
from ep_server.frontend.server import Server
from ep_server.observability.metrics import PREFIX

DEMO_MODEL = Path(__file__).parents[2] / "assets" / "demo_model"
MAX_NEW_TOKENS = 8  # an answer has five, its end included
ANSWER_SECONDS = 60.0  # deadline of one answer
REPORT_SECONDS = 10.0  # ranks report their measurements twice a second
NAME = "demo"
PARTS = {
    "dispatch": ("send", "wait", "expand", "total"),
    "combine": ("send", "wait", "reduce", "total"),
}

OPENAI = """\
an OpenAI endpoint in front of a server:
  pip install 'ep-server[doors]' smg
  ep-server serve --model CHECKPOINT &
  smg launch --worker-urls grpc://127.0.0.1:50051 --port 8000"""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of the demo. seed None: drawn at random. keep: serve on until Ctrl-C."""

    ranks: int = 4
    seed: int | None = None
    questions: int = 20
    keep: bool = False
    model: Path = DEMO_MODEL


def command(
    ranks: Annotated[int, typer.Option(min=1, max=64, help="Rank processes.")] = 4,
    questions: Annotated[int, typer.Option(min=1, help="Number of sums.")] = 20,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of the sums; printed.", show_default="drawn at random"),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep serving until Ctrl-C.")] = False,
) -> None:
    """Serve a small model that adds and subtracts, ask it sums over gRPC, and print latencies by part."""
    raise typer.Exit(main(DemoOptions(ranks=ranks, seed=seed, questions=questions, keep=keep)))


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
            "log.level": "warning",
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
                gateway = f"smg launch --worker-urls grpc://{app.server.address} --port 8000"
                console.print(f"OpenAI endpoint: {gateway}", soft_wrap=True)
                console.print("serving until Ctrl-C")
                await asyncio.wait((life,))
    if not options.keep:
        console.print(OPENAI, soft_wrap=True, markup=False)
    clean = life.result() == 0
    console.print("stopped cleanly" if clean else "a rank was lost")
    return 0 if clean and all(answer.right for answer in answers) else 1


async def _show(app: App, sums: list[Sum], console: Console) -> list[Answer]:
    """Asks the sums, prints answers and measurements."""
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
    """Runs the server until the context ends. Yields: its task. Raises: StartupError."""
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
    """Asks all sums at once and prints each answer as it arrives."""
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
    """GetEpStateResponse, once every rank has reported that it is idle."""
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


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answer to a sum."""

    sum: Sum
    text: str
    tokens: int

    @property
    def right(self) -> bool:
        """Whether the answer is correct."""
        return parse_answer(self.text) == self.sum.answer


class Output(Console):
    """Standard output. A reader that leaves early (`| head`) is not an error."""

    def __init__(self) -> None:
        super().__init__(highlight=False)

    def on_broken_pipe(self) -> None:
        """Rich would exit here, in the middle of a callback."""
        self.quiet = True
        with Path(os.devnull).open("wb") as nowhere:  # for what is still buffered
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def answer_line(answer: Answer) -> Text:
    """`a + b = c`, and whether it is correct."""
    asked = answer.sum
    line = f"{asked.a:>5} {asked.op} {asked.b:>3} = {answer.text.strip():<5}"
    if answer.right:
        return Text(line).append(" ok", "green")
    return Text(line).append(f" wrong, it is {asked.answer}", "red")


def speed_line(answers: Iterable[Answer], seconds: float) -> str:
    """Correct answers, tokens and tokens per second."""
    several = list(answers)
    right, tokens = sum(each.right for each in several), sum(each.tokens for each in several)
    rate = f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f} tokens/s"
    return f"{right} of {len(several)} right; {rate}"


def latency_table(state: Any) -> Table:
    """Latencies of dispatch and combine by part, over all ranks. state: a GetEpStateResponse."""
    table = Table(title="dispatch and combine, all ranks, microseconds", title_justify="left")
    for heading in ("operation", "part"):
        table.add_column(heading)
    for heading in ("count", "mean", "p50", "p99"):
        table.add_column(heading, justify="right")
    measured = {(each.op, each.part): each for each in state.latencies}
    for op, parts in PARTS.items():
        for part in parts:
            if (row := measured.get((op, part))) is not None:
                times = (row.mean_seconds, row.p50_seconds, row.p99_seconds)
                table.add_row(op, part, f"{row.count:,}", *(f"{seconds * 1e6:,.0f}" for seconds in times))
        table.add_section()
    return table
