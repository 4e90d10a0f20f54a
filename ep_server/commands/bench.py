"""`ep-server bench`: load on a running server, a table of latencies and throughput."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
import uvloop
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ep_server.bench import Load, Report, run
from ep_server.client import AsyncClient, Target
from ep_server.commands import options
from ep_server.errors import ConfigError

NAME = "bench"
LATENCIES = ("time_to_first_token", "inter_token_latency", "end_to_end")


def command(
    requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Closed loop: requests at once.")] = 8,
    rate: Annotated[float, typer.Option(min=0, help="Poisson arrivals per second; 0 = closed loop.")] = 0.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Random token ids per prompt.")] = 32,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of output per request.")] = 64,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the clock starts.")] = 2,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, durations in seconds.")] = False,
    address: options.Address = options.ADDRESS,
    tls_ca: options.TlsCa = "",
    tls_cert: options.TlsCert = "",
    tls_key: options.TlsKey = "",
    token_file: options.TokenFile = "",
) -> None:
    """Put load on a running server and print TTFT, ITL, end-to-end latency and throughput."""
    target = options.target(address, tls_ca, tls_cert, tls_key, token_file)

    def load(count: int, vocab_size: int) -> Load:
        return Load(count, concurrency, rate, prompt_tokens, new_tokens, vocab_size, seed)

    report, info = uvloop.run(_run(target, warmup, requests, load, quiet=as_json))
    if as_json:
        print(json.dumps({"model": info.name, **report.summary(), "statuses": dict(report.errors)}))
    else:
        arrivals = f"{rate:g} requests/s (Poisson)" if rate else f"{concurrency} at once"
        title = f"{info.name}: {requests} requests, {arrivals}, {prompt_tokens} + {new_tokens} tokens"
        _print(report, title)
    raise typer.Exit(1 if report.errors else 0)


async def _run(target: Target, warmup: int, requests: int, load: Any, *, quiet: bool) -> tuple[Report, Any]:
    async with AsyncClient(target) as client:
        info = await client.model_info()
        asked = load(requests, info.vocab_size)
        if asked.prompt_tokens + asked.new_tokens > info.max_context:
            allowed = f"at most {info.max_context}, the context"
            raise ConfigError(
                "--prompt-tokens + --new-tokens", asked.prompt_tokens + asked.new_tokens, allowed
            )
        if warmup:
            await run(client, load(warmup, info.vocab_size))
        with Progress(console=Console(stderr=True), transient=True, disable=quiet) as progress:
            task = progress.add_task("requests", total=requests)
            return await run(client, asked, lambda: progress.advance(task)), info


def _print(report: Report, title: str) -> None:
    console, summary = Console(), report.summary()
    table = Table("milliseconds", "mean", "p50", "p90", "p99", "max", title=title)
    for name in LATENCIES:
        values: Any = summary[name]
        cells = [
            f"{1000 * values[key]:.2f}" if values else "-" for key in ("mean", "p50", "p90", "p99", "max")
        ]
        table.add_row(name.replace("_", " "), *cells)
    console.print(table)
    console.print(
        f"{summary['tokens_per_second']:.1f} tokens/s, {summary['requests_per_second']:.2f} requests/s, "
        f"{summary['tokens_per_message']:.2f} tokens per message, {summary['seconds']:.1f} s"
    )
    for status, count in report.errors.items():
        console.print(f"[red]{count} ended with {status}[/]")
