"""`ep-server chaos`: loses and changes ranks of a server at random, and checks that no stream shows it.

Every request runs once undisturbed, then again and again while ranks are killed and stalled, join and leave,
and get new weights. Units: seconds.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from ep_server.cli import options
from ep_server.cli.chaos.faults import (
    FaultKind,
    FaultPlan,
    Faults,
    check_recovers,
    parent_of,
    settled_pids,
)
from ep_server.cli.chaos.streams import Answer, Asked, Lengths, draw_requests, seen
from ep_server.cli.progress import Bars
from ep_server.client import AsyncClient, AsyncStream, Output, PrefillDecode, Target
from ep_server.errors import ConfigError, EpServerError

NAME = "chaos"
PANEL = {"rich_help_panel": "Faults"}
LOAD = {"rich_help_panel": "Streams"}
SETTLE_SECONDS = 30.0
MIB = 1 << 20
Ask = Callable[..., Awaitable[AsyncStream]]  # prompt and fields -> the stream


@dataclass(slots=True)
class Report:
    """What was found.

    differences, errors, left: one line each; left: what the server still holds at the end.
    gaps: the longest one of each sequence during each loss and change, in seconds.
    pauses: of each change, as the server reports them.
    first_tokens: seconds to the first token of each stream. handed_off: streams whose prompt came from a
        prefill server. same_tokens: streams with the tokens of the undisturbed run, however scores round.
    memory_mib: of the server, before and after.
    """

    exact: bool
    streams: int = 0
    rounds: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    recoveries: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    gaps: dict[str, list[float]] = field(
        default_factory=lambda: {"undisturbed": [], "lost rank": [], "other ranks": [], "change": []}
    )
    pauses: list[float] = field(default_factory=list)
    first_tokens: dict[str, list[float]] = field(default_factory=lambda: {"undisturbed": [], "losses": []})
    handed_off: int = 0
    same_tokens: int = 0
    memory_mib: tuple[float, float] = (0.0, 0.0)

    @property
    def good(self) -> bool:
        """No stream showed a fault, and nothing is left."""
        return not (self.errors or self.differences or self.left)


def command(
    faults: Annotated[int, typer.Option(min=1, max=10_000, help="Losses and changes in all.", **PANEL)] = 10,
    kind: Annotated[
        list[FaultKind] | None,
        typer.Option(
            help="kill (SIGKILL), stall (SIGSTOP), server (the prefill server is killed; something else must "
            "start it again), scale (ranks join, leave and are held out) or update (the same weights anew). "
            "Repeat for several. Default: kill.",
            **PANEL,
        ),
    ] = None,
    scale_ranks: Annotated[
        tuple[int, int],
        typer.Option(
            help="Fewest and most ranks that a scale leaves. 0: parallel.ranks, parallel.max_ranks.", **PANEL
        ),
    ] = (0, 0),
    together: Annotated[int, typer.Option(min=1, max=63, help="Ranks of one loss.", **PANEL)] = 1,
    apart: Annotated[float, typer.Option(min=0, max=60, help="Seconds between these.", **PANEL)] = 0.1,
    every: Annotated[
        float,
        typer.Option(min=0.01, max=3600, help="Mean seconds from a recovery to the next loss.", **PANEL),
    ] = 2.0,
    recover_seconds: Annotated[
        float, typer.Option(min=1, max=3600, help="A recovery that takes longer is an error.", **PANEL)
    ] = 120.0,
    seed: Annotated[int, typer.Option(help="Seed of faults and requests.", **PANEL)] = 0,
    streams: Annotated[int, typer.Option(min=1, max=4096, help="Requests at once.", **LOAD)] = 16,
    prompt_tokens: Annotated[tuple[int, int], typer.Option(help="Shortest and longest prompt.", **LOAD)] = (
        16,
        512,
    ),
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an output.", **LOAD)] = 256,
    prefill: Annotated[
        str,
        typer.Option(
            help="host:port of a prefill server: prompts are handed off from it, and half of the losses are "
            "its own; two thirds with --kind server.",
            **LOAD,
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    address: options.Address = options.ADDRESS,
    tls_ca: options.TlsCa = "",
    tls_cert: options.TlsCert = "",
    tls_key: options.TlsKey = "",
    token_file: options.TokenFile = "",
) -> None:
    """Kill, stall and scale ranks of a running server on this machine, and check that no stream shows it.

    Each request first runs undisturbed. With CPU ranks, model.dtype = float32 and exchange.reduction =
    source, every output must then be the same to the last bit. Otherwise sums round differently, and only
    the number of tokens must be the same. Exit code 1: a stream ended with an error or differs, or the server
    still holds requests or KV blocks at the end. Raise resilience.max_losses of the server above --faults.
    """
    shortest, longest = prompt_tokens
    if not 1 <= shortest <= longest:
        raise ConfigError("--prompt-tokens", prompt_tokens, "two numbers from 1, the smaller one first")
    if FaultKind.SERVER in (kind or ()) and not prefill:
        raise ConfigError("--kind", FaultKind.SERVER, "used with --prefill")
    plan = FaultPlan(faults, kind or [FaultKind.KILL], together, apart, every, recover_seconds, scale_ranks)
    if prefill and FaultKind.UPDATE in plan.kinds:
        raise ConfigError("--kind", "update", "not given with --prefill: both servers need the same weights")
    target = options.target(address, tls_ca, tls_cert, tls_key, token_file)
    lengths = Lengths(prompt_tokens, max_new_tokens)
    first = options.target(prefill, tls_ca, tls_cert, tls_key, token_file) if prefill else None
    report = uvloop.run(run(target, plan, lengths, streams, seed, first))
    if as_json:
        print(json.dumps(as_dict(report)))
    else:
        show(report, Console())
    raise typer.Exit(0 if report.good else 1)


async def run(
    target: Target,
    plan: FaultPlan,
    lengths: Lengths,
    streams: int,
    seed: int,
    prefill: Target | None = None,
) -> Report:
    """The whole command. prefill: the server that prompts are handed off from.

    Raises: ConfigError for a server that is not on this machine, does not recover or is too small.
    """
    draw = random.Random(seed)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(target))
        clients, ask = [client], _direct(client)
        if prefill is not None:
            clients.append(await stack.enter_async_context(AsyncClient(prefill)))
            pair = await stack.enter_async_context(PrefillDecode(prefill, client))
            ask = pair.generate
        report = Report(all([await check_recovers(each) for each in clients]))
        faults = [await Faults.on(*each, draw) for each in _shares(clients, plan)]
        for each in clients:
            ranks = len(await settled_pids(each, SETTLE_SECONDS))
            if plan.together > ranks:
                raise ConfigError("--together", plan.together, f"at most {ranks}, the ranks of the server")
        model = await client.model_info()
        if lengths.prompt[1] + lengths.output > model.max_context:
            allowed = f"at most {model.max_context} tokens with --max-new-tokens {lengths.output}"
            raise ConfigError("--prompt-tokens", lengths.prompt, allowed)
        asked = draw_requests(draw, streams, lengths, model.vocab_size, has_text=model.has_tokenizer)
        if prefill is not None:  # what is cached would not be handed off
            asked = [Asked(one.prompt_ids, {**one.fields, "bypass_prefix_cache": True}) for one in asked]
        undisturbed = await asyncio.gather(*(_answer(_direct(client), one) for one in asked))
        expected = [answer.output for answer in undisturbed]
        report.first_tokens["undisturbed"] = [answer.first_token for answer in undisturbed]
        before = await _memory(client)
        with Bars(Console(stderr=True), lambda text: None) as bars:
            answers = list[Answer]()
            running = asyncio.ensure_future(_all(faults))
            try:
                while not running.done():
                    answers += await _round(ask, asked, expected, report)
                    bars.show("faults", sum(each.count for each in faults), plan.count)
                with suppress(EpServerError):
                    await running
                if (error := running.exception()) is not None:
                    report.errors.append(str(error))
            finally:
                running.cancel()
                for one in faults:
                    one.wake_stalled()
        try:
            report.left = [line for each in clients for line in await _left(each)]
            report.memory_mib = before, await _memory(client)
        except EpServerError as error:  # it has ended
            report.left = [str(error)]
    kinds = [kind for each in faults for kind in each.kinds]
    report.faults = {kind.value: kinds.count(kind) for kind in FaultKind}
    report.pauses = [change.pause for each in faults for change in each.changes.done]
    report.recoveries = [loss.ended - loss.began for each in faults for loss in each.losses]
    for answer in answers:
        _add_gaps(report, answer, faults[0])
    return report


def _direct(client: AsyncClient) -> Ask:
    """Requests without a hand-off."""

    async def ask(prompt: Sequence[int], **fields: Any) -> AsyncStream:
        return client.generate(prompt, **fields)

    return ask


def _shares(clients: Sequence[AsyncClient], plan: FaultPlan) -> list[tuple[AsyncClient, FaultPlan]]:
    """Each server's part of the losses, by its kinds of them: only the prefill server starts again itself."""
    if len(clients) == 1:
        return [(clients[0], plan)]
    kinds = [kind for kind in plan.kinds if kind is not FaultKind.SERVER]
    first = -(-plan.count * len(kinds) // (len(kinds) + len(plan.kinds)))
    counts = first, plan.count - first
    return [
        (client, replace(plan, count=count, kinds=each))
        for client, count, each in zip(clients, counts, (kinds, plan.kinds), strict=True)
    ]


async def _all(faults: Sequence[Faults]) -> None:
    """Loses ranks of all servers at once. Raises: as Faults.run()."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in faults:
                group.create_task(each.run())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _round(
    ask: Ask, asked: Sequence[Asked], expected: Sequence[Output], report: Report
) -> list[Answer]:
    """Runs all requests at once, and compares. Returns: those that were answered to the end."""
    found = await asyncio.gather(*(_answer(ask, one) for one in asked), return_exceptions=True)
    answers = []
    report.rounds += 1
    for number, (answer, undisturbed) in enumerate(zip(found, expected, strict=True)):
        report.streams += 1
        name = f"round {report.rounds}, stream {number}, {dict(asked[number].fields)}"
        if isinstance(answer, BaseException):
            if not isinstance(answer, EpServerError):
                raise answer
            report.errors.append(f"{name}: {answer}")
            continue
        answers.append(answer)
        report.same_tokens += _ids(answer.output) == _ids(undisturbed)
        report.first_tokens["losses"].append(answer.first_token)
        report.handed_off += answer.handed_off and asked[number].fields.get("bypass_prefix_cache", False)
        if _shown(answer.output, asked[number], report) != _shown(undisturbed, asked[number], report):
            report.differences.append(name)
    return answers


def _ids(output: Output) -> list[list[int]]:
    return [each.token_ids for each in output.sequences]


def _add_gaps(report: Report, answer: Answer, faults: Faults) -> None:
    """Counts the longest gap of each sequence during each loss or change; else its longest one at all."""
    rank, met = answer.output.info and answer.output.info.rank, False
    for change in faults.changes.done:
        gaps = answer.gaps(change.began, change.ended)
        report.gaps["change"] += gaps
        met = met or bool(gaps)
    for loss in faults.losses:
        gaps = answer.gaps(loss.began, loss.ended)
        report.gaps["lost rank" if rank in loss.ranks else "other ranks"] += gaps
        met = met or bool(gaps)
    if not met:
        report.gaps["undisturbed"] += answer.gaps()


def _shown(output: Output, asked: Asked, report: Report) -> Any:
    """What must be equal. Where rounding differs, the length of an output that a text may end is free."""
    free = not report.exact and not asked.fields["ignore_eos"]
    return len(output.sequences) if free else seen(output, exact=report.exact)


async def _answer(ask: Ask, one: Asked) -> Answer:
    began = time.monotonic()
    stream = await ask(one.prompt_ids, **one.fields)
    answer = Answer(stream.output, began)
    async for tokens in stream:
        answer.arrivals.setdefault(tokens.index, []).append(time.monotonic())
    return answer


async def _left(client: AsyncClient) -> list[str]:
    """What the server still holds once every stream has ended; it may take a moment to free it."""
    left: list[str] = []
    for _ in range(int(SETTLE_SECONDS / 0.1)):
        loads = await client.loads()
        left = [f"{loads.in_flight} requests"] if loads.in_flight else []
        for rank in loads.ranks:
            if rank.running or rank.waiting or rank.kv_blocks_used:
                left.append(
                    f"rank {rank.rank}: {rank.running} running, {rank.waiting} waiting, "
                    f"{rank.kv_blocks_used} KV blocks"
                )
        if not left:
            break
        await asyncio.sleep(0.1)
    return left


async def _memory(client: AsyncClient) -> float:
    """Resident memory of the ranks and of the process that started them, MiB."""
    pids = list((await settled_pids(client, SETTLE_SECONDS)).values())
    found = 0
    for pid in (*pids, parent_of(pids[0])):
        with suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            found += next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return found / 1024


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p99 and max; empty without values."""
    if not values:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return {"p50": cuts[49], "p99": cuts[98], "max": max(values)}


def as_dict(report: Report) -> dict[str, Any]:
    """For --json; durations in seconds."""
    return {
        "good": report.good,
        "exact": report.exact,
        "streams": report.streams,
        "rounds": report.rounds,
        "faults": report.faults,
        "errors": report.errors,
        "differences": report.differences,
        "left": report.left,
        "recovery_seconds": quantiles(report.recoveries),
        "pause_seconds": quantiles(report.pauses),
        "longest_gap_seconds": {name: quantiles(values) for name, values in report.gaps.items()},
        "first_token_seconds": {name: quantiles(values) for name, values in report.first_tokens.items()},
        "handed_off": report.handed_off,
        "same_tokens": report.same_tokens,
        "memory_mib": report.memory_mib,
    }


def show(report: Report, console: Console) -> None:
    """As tables."""
    faults = ", ".join(f"{count} x {kind}" for kind, count in report.faults.items() if count)
    rule = "to the last bit" if report.exact else "the number of tokens"
    console.print(f"{report.streams} streams in {report.rounds} rounds: {faults}")
    console.print(f"compared with an undisturbed run: {rule}")
    if report.handed_off:
        console.print(f"{report.handed_off} prompts were handed off")
    table = Table("seconds", "p50", "p99", "max")
    rows = {"recovery": report.recoveries, "pause of a change": report.pauses}
    rows |= {f"longest gap, {k}": v for k, v in report.gaps.items()}
    rows |= {f"first token, {k}": v for k, v in report.first_tokens.items()}
    for name, values in rows.items():
        if values:
            table.add_row(name, *(f"{value:.2f}" for value in quantiles(values).values()))
    console.print(table)
    console.print("memory of the server: {:.0f} MiB before, {:.0f} after".format(*report.memory_mib))
    problems = {"error": report.errors, "different": report.differences, "left": report.left}
    for word, lines in problems.items():
        for line in lines:
            console.print(f"[red]{word}[/]: {line}", soft_wrap=True)
    console.print("no stream shows a fault" if report.good else "[red]streams show faults[/]")
