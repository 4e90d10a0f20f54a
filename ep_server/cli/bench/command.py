"""`ep-server bench online` and `ep-server bench offline`: their options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer
import uvloop

from ep_server.cli import options
from ep_server.cli.bench import offline, online
from ep_server.cli.bench.breakdown import Rates
from ep_server.cli.bench.load import Load
from ep_server.cli.bench.report import Output
from ep_server.cli.bench.summary import Plan, Slo
from ep_server.cli.inspect import CPU_BANDWIDTH, DEVICES, GB, GPUS
from ep_server.client import Target
from ep_server.config import Config
from ep_server.errors import ConfigError
from ep_server.frontend.requests import MAX_STREAM_INTERVAL

DAY = 86_400.0  # seconds
MOST = 1e6  # upper limit of numbers that have no natural one; keeps infinity out
LARGEST_BATCH = 4096

# Options of a command -> fields of the configuration.
FIELDS = {
    "--model": "model.path",
    "--ranks": "parallel.ranks",
    "--dtype": "model.dtype",
    "--load-format": "model.load_format",
    "--routing": "model.routing",
    "--overlap": "parallel.overlap",
}

LOAD, GOALS, BOUNDS, MODEL, OUTPUT = "Load", "Goodput", "Bounds", "Model to start", "Output"

PromptTokens = Annotated[int, typer.Option(min=1, help="Random token ids per prompt.", rich_help_panel=LOAD)]
NewTokens = Annotated[int, typer.Option(min=1, help="Output tokens per request.", rich_help_panel=LOAD)]
Seed = Annotated[int, typer.Option(help="Seed of prompts and arrivals.", rich_help_panel=LOAD)]
Timeout = Annotated[
    float, typer.Option(min=0.1, max=DAY, help="Seconds that one request may take.", rich_help_panel=LOAD)
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print JSON instead of tables. Times are seconds.", rich_help_panel=OUTPUT),
]
JsonFile = Annotated[
    str, typer.Option(help="Write the JSON to this file.", show_default=False, rich_help_panel=OUTPUT)
]
Chart = Annotated[
    str, typer.Option(help="Write a chart to this .svg file.", show_default=False, rich_help_panel=OUTPUT)
]
ModelPath = Annotated[
    str | None, typer.Option(help="Checkpoint directory.", show_default=False, rich_help_panel=MODEL)
]
RankCount = Annotated[
    int | None, typer.Option(help="Rank processes.", show_default="1", rich_help_panel=MODEL)
]
Dtype = Annotated[
    str | None,
    typer.Option(help="Compute type: auto, float32 or bfloat16.", show_default="auto", rich_help_panel=MODEL),
]
LoadFormat = Annotated[
    str | None,
    typer.Option(
        help="Weights: auto reads them, dummy draws random ones for config.json.",
        show_default="auto",
        rich_help_panel=MODEL,
    ),
]
Routing = Annotated[
    str | None,
    typer.Option(
        help="Experts: router chooses them, uniform draws them at random.",
        show_default="router",
        rich_help_panel=MODEL,
    ),
]
Overlap = Annotated[
    str | None,
    typer.Option(
        help="Two micro-batches per step: on, off or auto.", show_default="auto", rich_help_panel=MODEL
    ),
]
ConfigFile = Annotated[
    str | None,
    typer.Option("--config", help="TOML file, as for serve.", show_default=False, rich_help_panel=MODEL),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Any other option, as section.field=value. Repeatable. GPUs: parallel.device=cuda.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]

app = typer.Typer(
    help="Measure a server (online) or an engine without gRPC (offline).",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@app.command("online", cls=options.Command)
def online_command(
    context: typer.Context,
    requests: Annotated[int, typer.Option(min=1, help="Requests in total.", rich_help_panel=LOAD)] = 64,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Closed loop: requests in flight.", rich_help_panel=LOAD)
    ] = 8,
    rate: Annotated[
        float,
        typer.Option(
            min=0, max=MOST, help="Poisson arrivals per second; 0 = closed loop.", rich_help_panel=LOAD
        ),
    ] = 0.0,
    prompt_tokens: PromptTokens = 32,
    new_tokens: NewTokens = 64,
    stream_interval: Annotated[
        int,
        typer.Option(min=1, max=MAX_STREAM_INTERVAL, help="Tokens per message.", rich_help_panel=LOAD),
    ] = 1,
    warmup: Annotated[
        int, typer.Option(min=0, help="Requests before the clock starts.", rich_help_panel=LOAD)
    ] = 2,
    clients: Annotated[int, typer.Option(min=1, max=64, help="Client processes.", rich_help_panel=LOAD)] = 1,
    seed: Seed = 0,
    timeout: Timeout = 600.0,
    slo_ttft_ms: Annotated[
        float | None,
        typer.Option(min=0, max=MOST, help="Longest time to first token.", rich_help_panel=GOALS),
    ] = None,
    slo_itl_ms: Annotated[
        float | None,
        typer.Option(
            min=0, max=MOST, help="Longest mean gap between a request's tokens.", rich_help_panel=GOALS
        ),
    ] = None,
    address: options.Address = options.ADDRESS,
    tls_ca: options.TlsCa = "",
    tls_cert: options.TlsCert = "",
    tls_key: options.TlsKey = "",
    token_file: options.TokenFile = "",
    model: ModelPath = None,
    ranks: RankCount = None,
    dtype: Dtype = None,
    load_format: LoadFormat = None,
    routing: Routing = None,
    overlap: Overlap = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
    json_file: JsonFile = "",
    chart: Chart = "",
) -> None:
    """Measure latency, throughput and goodput over gRPC.

    Sends requests to the server at --address, or starts a server for --model. The load is a closed loop of
    --concurrency requests, or Poisson arrivals at --rate, whose latencies count from the planned arrival.
    With as many --requests as --concurrency, all streams decode together.

    Exit code 1 if a request failed.
    """
    output = Output(as_json, json_file, chart)
    output.check()
    load = Load(
        requests,
        concurrency,
        rate,
        prompt_tokens,
        new_tokens,
        seed=seed,
        stream_interval=stream_interval,
        timeout=timeout,
    )
    slo = Slo(*(None if limit is None else limit / 1000 for limit in (slo_ttft_ms, slo_itl_ms)))
    with naming_options():
        if model is None:
            options.refuse_panels(context, {MODEL: "with --model"})
            server: Target | Config = options.target(address, tls_ca, tls_cert, tls_key, token_file)
        else:
            options.refuse_panels(context, {options.SERVER: "without --model"})
            given = (model, ranks, dtype, load_format, routing, overlap)
            server = configuration(given, config_file, settings)
        code = uvloop.run(online.run(server, load, clients=clients, warmup=warmup, slo=slo, output=output))
    raise typer.Exit(code)


@app.command("offline", cls=options.Command)
def offline_command(
    batch: Annotated[
        str, typer.Option(help="Sequences per rank, separated by commas.", rich_help_panel=LOAD)
    ] = "1,8,32",
    prompt_tokens: PromptTokens = 32,
    new_tokens: NewTokens = 64,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds per batch size; the median counts.", rich_help_panel=LOAD)
    ] = 3,
    seed: Seed = 0,
    timeout: Timeout = 600.0,
    model: ModelPath = None,
    ranks: RankCount = None,
    dtype: Dtype = None,
    load_format: LoadFormat = None,
    routing: Routing = None,
    overlap: Overlap = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    device: Annotated[
        str,
        typer.Option(
            help=f"Hardware whose bandwidths give the bounds: {' | '.join(DEVICES)}.",
            show_default="cpu for CPU ranks, h200 for GPU ranks",
            rich_help_panel=BOUNDS,
        ),
    ] = "",
    bandwidth: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=MOST,
            help="GB/s that a rank reads from memory.",
            show_default="of the hardware; cpu: 30 / ranks",
            rich_help_panel=BOUNDS,
        ),
    ] = None,
    link: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=MOST,
            help="GB/s from a rank to the others.",
            show_default="of the hardware; cpu: --bandwidth",
            rich_help_panel=BOUNDS,
        ),
    ] = None,
    as_json: AsJson = False,
    json_file: JsonFile = "",
    chart: Chart = "",
) -> None:
    """Measure decode throughput of an engine in this process, without gRPC.

    Submits all prompts at once. Reports decode tokens/s without the prefill, the phases of a step beside
    their lower bounds, and how evenly the experts were used.
    """
    output = Output(as_json, json_file, chart)
    output.check()
    plan = Plan(batches(batch), prompt_tokens, new_tokens, rounds, seed, timeout)
    with naming_options():
        given = (model, ranks, dtype, load_format, routing, overlap)
        config = configuration(given, config_file, settings)
        bounds = rates(config, device, bandwidth or 0.0, link or 0.0)
        code = uvloop.run(offline.run(config, plan, bounds, output))
    raise typer.Exit(code)


def configuration(
    given: Sequence[str | int | None], config_file: str | None, settings: Sequence[str] | None
) -> Config:
    """The configuration of the model to start. --set overrides the other options.

    given: values of FIELDS. Raises: ConfigError.
    """
    flags = dict(zip(FIELDS.values(), given, strict=True))
    for setting in settings or ():
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError("--set", setting, "section.field=value")
        flags[name] = value
    return Config.load(config_file, flags)


@contextmanager
def naming_options() -> Iterator[None]:
    """Errors name a field of FIELDS by its option."""
    try:
        yield
    except ConfigError as error:
        names = [option for option, field in FIELDS.items() if field == error.field]
        raise ConfigError(names[0] if names else error.field, error.value, error.allowed) from error


def batches(text: str) -> tuple[int, ...]:
    """The value of --batch. Raises: ConfigError."""
    try:
        numbers = tuple(int(number) for number in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(1 <= number <= LARGEST_BATCH for number in numbers):
        raise ConfigError("--batch", text, f"numbers from 1 to {LARGEST_BATCH}, separated by commas")
    return numbers


def rates(config: Config, device: str, bandwidth: float, link: float) -> Rates:
    """The rates that give the bounds.

    Args:
        device: "" = cpu for CPU ranks, h200 for GPU ranks. bandwidth, link: GB/s of a rank; 0 = the device's.
    Raises: ConfigError for an unknown device.
    """
    device = device or ("cpu" if config.parallel.device == "cpu" else "h200")
    if device == "cpu":
        memory = bandwidth or CPU_BANDWIDTH / config.parallel.ranks
        return Rates(memory * GB, (link or memory) * GB)
    if device not in GPUS:
        raise ConfigError("--device", device, "one of " + ", ".join(DEVICES))
    _, memory, between, _ = GPUS[device]
    return Rates(
        (bandwidth or memory) * GB, (link or between) * GB, packed=False, kv_dtype=config.model.kv_dtype
    )
