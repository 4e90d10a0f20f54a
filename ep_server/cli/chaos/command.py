"""`ep-server chaos`: loses and changes ranks of a server at random, and checks that no stream shows it.

Every request runs once undisturbed, then again and again while ranks are killed and stalled, join and leave,
and get new weights. Units: seconds.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.console import Console

from ep_server.cli import options
from ep_server.cli.chaos.faults import (
    FaultKind,
    FaultPlan,
    Faults,
    ServerShape,
    elsewhere,
    parent_of,
    settled_pids,
    shape_of,
)
from ep_server.cli.chaos.report import Report, as_dict, show
from ep_server.cli.chaos.rounds import (
    Ask,
    HostHits,
    add_gaps,
    answers_of,
    compare,
    direct,
    in_turn,
    whole,
)
from ep_server.cli.chaos.streams import Answer, Asked, Lengths, draw_requests
from ep_server.cli.progress import Bars
from ep_server.client import AsyncClient, PrefillDecode, Target
from ep_server.errors import ConfigError, EpServerError

NAME = "chaos"
PANEL = {"rich_help_panel": "Faults"}
LOAD = {"rich_help_panel": "Streams"}
SETTLE_SECONDS = 30.0
MIB = 1 << 20


def command(
    faults: Annotated[int, typer.Option(min=1, max=10_000, help="Losses and changes in all.", **PANEL)] = 10,
    kind: Annotated[
        list[FaultKind] | None,
        typer.Option(
            help="kill (SIGKILL), stall (SIGSTOP), server (the prefill server is killed), node (a node is "
            "killed, but not the first; something else must start it or the server again), scale (ranks "
            "join, leave and are held out) or update (the same weights anew). Repeat for several. "
            "Default: kill.",
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
    gateway: Annotated[
        bool,
        typer.Option(
            "--gateway",
            help="With --prefill: every second prompt is handed off as a gateway does it, through VllmEngine "
            "of the prefill server and kv_transfer_params_json.",
            **LOAD,
        ),
    ] = False,
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
    if gateway and not prefill:
        raise ConfigError("--gateway", gateway, "used with --prefill")
    if FaultKind.SERVER in (kind or ()) and not prefill:
        raise ConfigError("--kind", FaultKind.SERVER, "used with --prefill")
    plan = FaultPlan(faults, kind or [FaultKind.KILL], together, apart, every, recover_seconds, scale_ranks)
    if prefill and FaultKind.UPDATE in plan.kinds:
        raise ConfigError("--kind", "update", "not given with --prefill: both servers need the same weights")
    target = options.target(address, tls_ca, tls_cert, tls_key, token_file)
    lengths = Lengths(prompt_tokens, max_new_tokens)
    first = options.target(prefill, tls_ca, tls_cert, tls_key, token_file) if prefill else None
    report = uvloop.run(run(target, plan, lengths, streams, seed, first, gateway=gateway))
    if prefill and not report.handed_off:
        wanted = "its handoff.role must be prefill or both, the other server's decode or both"
        report.errors.append(f"nothing was handed off from {prefill}: {wanted}")
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
    *,
    gateway: bool = False,
) -> Report:
    """The whole command. prefill: the server that prompts are handed off from. gateway: also as one does it.

    Raises: ConfigError for a server that is not on this machine, does not recover or is too small.
    """
    draw = random.Random(seed)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(target))
        clients, ask = [client], direct(client)
        if prefill is not None:
            clients.append(await stack.enter_async_context(AsyncClient(prefill)))
            pair = await stack.enter_async_context(PrefillDecode(prefill, client))
            ask = pair.generate
            if gateway:
                ask = in_turn(ask, _gateway(*reversed(clients)))
        shapes = [await shape_of(each) for each in clients]
        report = Report(all(shape.exact for shape in shapes))
        begun = list[Answer]()
        faults = [await Faults.on(*each, draw, begun) for each in _shares(clients, shapes, plan)]
        report.elsewhere = [rank for each in clients for rank in await _elsewhere(each, plan)]
        asked = _requests(draw, await client.model_info(), lengths, streams, cached=prefill is None)
        silence = plan.recover_seconds + SETTLE_SECONDS
        undisturbed = [whole(one) for one in await answers_of(direct(client), asked, silence, begun)]
        expected = [answer.output for answer in undisturbed]
        report.first_tokens["undisturbed"] = [answer.first_token for answer in undisturbed]
        before, tiers = await _memory(client), HostHits(clients)
        await tiers.look()
        with Bars(Console(stderr=True), lambda text: None) as bars:
            answers = list[Answer]()
            running = asyncio.ensure_future(_all(faults))
            try:
                while not running.done():
                    found = await answers_of(ask, asked, silence, begun)
                    answers += compare(found, asked, expected, report)
                    report.host_tokens += await tiers.look()
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
        add_gaps(report, answer, faults[0])
    return report


def _requests(draw: random.Random, model: Any, lengths: Lengths, count: int, *, cached: bool) -> list[Asked]:
    """cached: all may use prefix caches, else two of four: what is cached is not handed off.

    Raises: ConfigError if they do not fit the context.
    """
    if lengths.prompt[1] + lengths.output > model.max_context:
        allowed = f"at most {model.max_context} tokens with --max-new-tokens {lengths.output}"
        raise ConfigError("--prompt-tokens", lengths.prompt, allowed)
    asked = draw_requests(draw, count, lengths, model.vocab_size, has_text=model.has_tokenizer)
    if cached:
        return asked
    return [
        Asked(one.prompt_ids, {**one.fields, "bypass_prefix_cache": number % 4 < 2})
        for number, one in enumerate(asked)
    ]


def _gateway(prefill: AsyncClient, decode: AsyncClient) -> Ask:
    """Asks as a gateway between both servers. Raises: ConfigError if the extra `doors` is not installed."""
    try:
        module = import_module("ep_server.cli.chaos.gateway")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ep_server"):
            raise
        raise ConfigError("--gateway", "true", "used where the extra `doors` is installed") from error
    ask: Ask = module.Gateway(prefill, decode).ask
    return ask


async def _elsewhere(client: AsyncClient, plan: FaultPlan) -> list[int]:
    """Ranks on other machines. Raises: ConfigError if too few are here."""
    ranks = len(await settled_pids(client, SETTLE_SECONDS))
    if plan.together > ranks:
        raise ConfigError("--together", plan.together, f"at most {ranks}, the server's ranks here")
    return await elsewhere(client)


def _shares(
    clients: Sequence[AsyncClient], shapes: Sequence[ServerShape], plan: FaultPlan
) -> list[tuple[AsyncClient, FaultPlan, ServerShape]]:
    """Each server's part of the losses, by its kinds of them: only the prefill server starts again itself.

    Raises: ConfigError if no server has several nodes, and one shall be lost.
    """
    kinds = [
        [
            kind
            for kind in plan.kinds
            if (kind is not FaultKind.NODE or shape.nodes > 1)
            and (kind is not FaultKind.SERVER or number > 0)
        ]
        for number, shape in enumerate(shapes)
    ]
    if FaultKind.NODE in plan.kinds and all(shape.nodes == 1 for shape in shapes):
        raise ConfigError("--kind", FaultKind.NODE, "used with a server of several nodes")
    first = plan.count if len(clients) == 1 else -(-plan.count * len(kinds[0]) // sum(map(len, kinds)))
    counts = (first, plan.count - first)[: len(clients)]
    return [
        (client, replace(plan, count=count, kinds=each), shape)
        for client, count, each, shape in zip(clients, counts, kinds, shapes, strict=True)
    ]


async def _all(faults: Sequence[Faults]) -> None:
    """Loses ranks of all servers at once. Raises: as Faults.run()."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in faults:
                group.create_task(each.run())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _left(client: AsyncClient) -> list[str]:
    """What the server still holds once every stream has ended; it may take a moment to free it.

    Blocks that a server holds for one that was lost stay until they expire.
    """
    left: list[str] = []
    hold_seconds = float((await client.diagnostics()).config["handoff.hold_seconds"])
    for _ in range(int((SETTLE_SECONDS + hold_seconds) / 0.1)):
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
    """Resident memory of the ranks of this machine and of the processes that started them, MiB."""
    pids = set((await settled_pids(client, SETTLE_SECONDS)).values())
    found = 0
    parents = {parent for pid in pids if (parent := parent_of(pid)) is not None}
    for pid in pids | parents:
        with suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            found += next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return found / 1024
