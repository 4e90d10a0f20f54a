"""`ep-server bench`: flags only; what it measures is ep_server.cli.bench."""

from __future__ import annotations

from typing import Annotated, Any

import typer
import uvloop

from ep_server.cli import options
from ep_server.cli.bench import offline_command as bench_offline
from ep_server.cli.bench import online_command as bench_online
from ep_server.cli.bench.output import Output
from ep_server.cli.inspect_plan import DEVICES
from ep_server.config import Config
from ep_server.errors import ConfigError
from ep_server.frontend.requests import MAX_STREAM_INTERVAL

NAME = "bench"
MODES = ("online", "offline")
DAY = 86_400.0  # seconds
MOST = 1e6  # of what would make no sense beyond, above all infinity
MODEL_FLAGS = (
    "model.path",
    "parallel.ranks",
    "model.dtype",
    "model.load_format",
    "model.routing",
    "parallel.overlap",
)
ONLINE: dict[str, Any] = {"rich_help_panel": "Online: over gRPC"}
OFFLINE: dict[str, Any] = {"rich_help_panel": "Offline: an engine in this process"}
MODEL: dict[str, Any] = {
    "rich_help_panel": "A model to start (offline; online if no server runs)",
    "show_default": False,
}


def command(
    context: typer.Context,
    mode: Annotated[str, typer.Argument(help=" | ".join(MODES), metavar="[MODE]")] = "online",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Random token ids per prompt.")] = 32,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of output per request.")] = 64,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=DAY, help="Seconds that one request may take.")
    ] = 600.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of tables, durations in seconds.")
    ] = False,
    json_file: Annotated[str, typer.Option(help="Write the same JSON to a file.", show_default=False)] = "",
    chart: Annotated[str, typer.Option(help="Write a chart: FILE.svg.", show_default=False)] = "",
    requests: Annotated[
        int, typer.Option(min=1, help="In all; as many as --concurrency: one wave.", **ONLINE)
    ] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Closed loop: requests at once.", **ONLINE)] = 8,
    rate: Annotated[
        float, typer.Option(min=0, max=MOST, help="Poisson arrivals per second; 0 = closed loop.", **ONLINE)
    ] = 0.0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the clock starts.", **ONLINE)] = 2,
    clients: Annotated[int, typer.Option(min=1, max=64, help="Client processes.", **ONLINE)] = 1,
    stream_interval: Annotated[
        int, typer.Option(min=1, max=MAX_STREAM_INTERVAL, help="Tokens of one message.", **ONLINE)
    ] = 1,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(min=0, max=MOST, help="Goodput: longest time to first token.", **ONLINE)
    ] = None,
    slo_itl_ms: Annotated[
        float | None,
        typer.Option(min=0, max=MOST, help="Goodput: longest mean gap between tokens.", **ONLINE),
    ] = None,
    batch: Annotated[str, typer.Option(help="Sequences per rank, with commas.", **OFFLINE)] = "1,8,32",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each; the median counts.", **OFFLINE)] = 3,
    device: Annotated[
        str,
        typer.Option(
            help=f"Whose rates make the bounds: {' | '.join(DEVICES)} (as the ranks run; a GPU is an h200).",
            show_default=False,
            **OFFLINE,
        ),
    ] = "",
    bandwidth: Annotated[
        float | None,
        typer.Option(
            min=0.001, max=MOST, help="GB/s a rank reads (cpu: 30 / ranks).", show_default=False, **OFFLINE
        ),
    ] = None,
    link: Annotated[
        float | None,
        typer.Option(
            min=0.001, max=MOST, help="GB/s to others (cpu: --bandwidth).", show_default=False, **OFFLINE
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Checkpoint directory.", **MODEL)] = None,
    ranks: Annotated[int | None, typer.Option(help="Rank processes (1).", **MODEL)] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 (auto).", **MODEL)] = None,
    load_format: Annotated[
        str | None, typer.Option(help="dummy = random weights; config.json will do (auto).", **MODEL)
    ] = None,
    routing: Annotated[
        str | None, typer.Option(help="uniform = experts drawn at random (router).", **MODEL)
    ] = None,
    overlap: Annotated[
        str | None, typer.Option(help="Two micro-batches per step: on, off, auto (auto).", **MODEL)
    ] = None,
    config_file: Annotated[
        str | None, typer.Option("--config", help="TOML file, as for serve.", **MODEL)
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="section.field=value, any other option; repeat it. GPUs: parallel.device=cuda.",
            **MODEL,
        ),
    ] = None,
    address: options.Address = options.ADDRESS,
    tls_ca: options.TlsCa = "",
    tls_cert: options.TlsCert = "",
    tls_key: options.TlsKey = "",
    token_file: options.TokenFile = "",
) -> None:
    """Measure a server or an engine: throughput, latencies, where the time of a step goes.

    [b]online[/]: load from client processes on a server that runs (--address)
    or on one of its own (--model). A closed loop of --concurrency streams, or
    Poisson arrivals at --rate, whose latencies count from the planned arrival.
    Prints TTFT, ITL, end-to-end latency, throughput and goodput; of a closed
    loop the tokens/s while all streams ran too, which is decoding alone where
    there are no more requests than streams.
    Exit code 1 if a request failed.

    [b]offline[/]: the engine of --model in this process, all prompts at once.
    Prints decode tokens/s without the prefill, the parts of a step beside the
    bound of each, and how evenly the experts were hit.
    """
    if mode not in MODES:
        raise ConfigError("MODE", mode, " or ".join(MODES))
    refuse_of_others(context, mode == "offline", model is not None)
    output = Output(as_json, json_file, chart)
    output.check()
    given = (model, ranks, dtype, load_format, routing, overlap)
    flags = {**dict(zip(MODEL_FLAGS, given, strict=True)), **assignments(settings or [])}
    if mode == "offline":
        config = Config.load(config_file, flags)
        plan = bench_offline.plan(batch, prompt_tokens, new_tokens, rounds, seed, timeout)
        rates = bench_offline.rates(config, device, bandwidth or 0.0, link or 0.0)
        raise typer.Exit(uvloop.run(bench_offline.run(config, plan, rates, output)))
    if model is None:
        refuse_without_model(flags, config_file)
    asked = bench_online.Asked(
        requests, concurrency, rate, prompt_tokens, new_tokens, seed, stream_interval, timeout
    )
    readers = bench_online.Readers(clients, warmup, slo_ttft_ms, slo_itl_ms)
    server = (
        options.target(address, tls_ca, tls_cert, tls_key, token_file)
        if model is None
        else Config.load(config_file, flags)
    )
    raise typer.Exit(uvloop.run(bench_online.run(server, asked, readers, output)))


def refuse_of_others(context: typer.Context, offline: bool, own: bool) -> None:
    """Flags that would change nothing, as they belong to the other mode. Raises: ConfigError."""
    idle = {OFFLINE["rich_help_panel"]: "bench offline"}
    if offline:
        idle = {ONLINE["rich_help_panel"]: "bench online", options.SERVER: "bench online"}
    elif own:
        idle[options.SERVER] = "a server that runs, without --model"
    options.refuse_panels(context, idle)


def assignments(settings: list[str]) -> dict[str, str]:
    """section.field=value, each. Raises: ConfigError."""
    found = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError("--set", setting, "section.field=value")
        found[name] = value
    return found


def refuse_without_model(flags: dict[str, Any], config_file: str | None) -> None:
    """Options of a server that is started make no difference to one that runs. Raises: ConfigError."""
    given = [name for name, value in flags.items() if value is not None]
    if given or config_file is not None:
        name = given[0] if given else "--config"
        raise ConfigError(name, flags.get(name, config_file), "given only with --model")
