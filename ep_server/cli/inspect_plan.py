"""What `ep-server inspect --plan` prints: a plan of ranks for a machine that need not be this one."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from ep_server.config import Config
from ep_server.errors import ConfigError
from ep_server.exchange.segment import available_memory
from ep_server.models.families import ModelSpec
from ep_server.models.sizes import context_limit
from ep_server.ranks.sizing import Machine, Sizing, Workload, fewest_ranks, size

GIB, GB = 1 << 30, 1e9
CPU_BANDWIDTH = 30.0  # GB/s that two cores of a server read; all CPU ranks of a host share it
GPU_KV_FRACTION = 0.8  # as model/gpu/memory.py has it
# GiB that programs see, GB/s of memory, GB/s to other GPUs (NVLink 4 reaches it one way), dense BF16 TFLOP/s
GPUS = {"h100": (79.0, 3350.0, 375.0, 989.0), "h200": (139.0, 4800.0, 375.0, 989.0)}
DEVICES = ("cpu", *GPUS)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Flags of --plan. None: of the device. memory: GiB; bandwidth, link: GB/s; all of one rank."""

    device: str
    ranks: int | None
    memory: float | None
    bandwidth: float | None
    link: float | None
    tokens: int
    context: int


def show(console: Console, config: Config, spec: ModelSpec, options: PlanOptions) -> None:
    """Prints the plan. Raises: ConfigError; StartupError where the model does not fit."""
    limit = context_limit(spec, config.model.max_context)
    for name, value, most, field in (
        ("--tokens", options.tokens, config.scheduler.max_step_tokens, "scheduler.max_step_tokens"),
        ("--context", options.context, limit, "the model's longest context or model.max_context"),
    ):
        if not 1 <= value <= most:
            raise ConfigError(name, value, f"1 to {most}, {field}")
    machine = machine_of(options, config.parallel.ranks)
    workload = Workload(options.tokens, options.context)
    find = fewest_ranks if options.ranks is None and options.device != "cpu" else size
    sizing = find(config, spec, machine, workload)
    console.print(_memory(sizing, spec, machine, workload))
    console.print(_step(sizing, workload))


def machine_of(options: PlanOptions, ranks: int) -> Machine:
    """What a rank runs on. Raises: ConfigError for an unknown device."""
    if options.device == "cpu":
        host, rate = available_memory() / ranks / GIB, CPU_BANDWIDTH / ranks
        memory, bandwidth, link, tera = host, rate, options.bandwidth or rate, 0.0
    elif options.device in GPUS:
        memory, bandwidth, link, tera = GPUS[options.device]
    else:
        raise ConfigError("--device", options.device, "one of " + ", ".join(DEVICES))
    given = (options.memory or memory) * GIB
    rates = ((options.bandwidth or bandwidth) * GB, (options.link or link) * GB)
    return Machine(int(given), *rates, flops=tera * 1e12, packed=options.device == "cpu")


def _memory(sizing: Sizing, spec: ModelSpec, machine: Machine, load: Workload) -> Table:
    ranks = f"{sizing.ranks} rank{'s' if sizing.ranks > 1 else ''}"
    table = Table(title=f"{spec.family} on {ranks}: memory of one rank")
    table.add_column("part")
    table.add_column("size", justify="right")
    table.add_column("share", justify="right")
    for part, number in sorted(sizing.parts.items(), key=lambda entry: -entry[1]):
        table.add_row(part, _bytes(number), f"{number / machine.memory:.1%}")
    table.add_section()
    table.add_row("all", _bytes(sizing.used), f"{sizing.used / machine.memory:.1%}")
    table.add_row("free", _bytes(machine.memory - sizing.used), "")
    table.caption = (
        f"KV cache: {sizing.kv_bytes_per_token:,} bytes per token, {sizing.kv_tokens:,} tokens\n"
        f"per rank: {sizing.kv_tokens // load.context:,} sequences of {load.context:,}"
    )
    return table


def _step(sizing: Sizing, load: Workload) -> Table:
    title = f"A decode step of {load.tokens} tokens per rank, {load.context:,} in the KV cache of each"
    table = Table(title=title)
    table.add_column("bound")
    table.add_column("MB, or GFLOP", justify="right")
    table.add_column("ms", justify="right")
    for bound in sizing.bounds:
        ms = f"{bound.seconds * 1e3:,.3f}" if bound.seconds or not bound.amount else "not bounded"
        table.add_row(bound.name, f"{bound.amount / (1e9 if bound.name == 'arithmetic' else 1e6):,.2f}", ms)
    table.add_section()
    seconds = sizing.step_seconds
    table.add_row("step, at least", "", f"{seconds * 1e3:,.3f}")
    expected, all_tokens = sizing.expected_seconds, load.tokens * sizing.ranks
    if expected is None:
        table.add_row("step, expected", "", "not measured")
        table.caption = f"at most {all_tokens / seconds:,.0f} tokens/s on all ranks"
    else:
        low, high = expected
        table.add_row("step, expected", "", f"{low * 1e3:,.1f} to {high * 1e3:,.1f}")
        rates = f"{all_tokens / high:,.0f} to {all_tokens / low:,.0f}"
        table.caption = f"{rates} tokens/s expected on all ranks, if each has its cores"
    return table


def _bytes(number: float) -> str:
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB")):
        if number >= unit:
            return f"{number / unit:,.2f} {name}"
    return f"{number / 1024:,.1f} KiB"
