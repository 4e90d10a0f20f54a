"""`ep-server inspect`: a checkpoint's contents and placement, and --plan. Reads headers, loads no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ep_server.cli import options
from ep_server.config import STEP_TOKENS, STEP_TOKENS_OF_GPUS, Config
from ep_server.errors import ConfigError
from ep_server.exchange.segment import available_memory
from ep_server.models.families import ModelSpec, read_spec
from ep_server.models.footprint import stay_fp8
from ep_server.models.inspect import Inspection, inspect_checkpoint, inspect_config
from ep_server.models.sizes import context_limit
from ep_server.ranks.group import GroupPlan, exchange_bytes, gpu_exchange, plan_group
from ep_server.ranks.sizing import Machine, Sizing, Workload, fewest_ranks, size
from ep_server.scheduler.placement import place_experts

NAME = "inspect"
MIB = 1 << 20
GIB, GB = 1 << 30, 1e9
CPU_BANDWIDTH = 30.0  # GB/s that two server cores read; all CPU ranks of a host share it
MOST_RUNNING = 4096  # of scheduler.max_running
GPU_KV_FRACTION = 0.8  # as backends/gpu/memory.py
# Usable GiB, GB/s from memory, GB/s to other GPUs (one way over NVLink 4), dense BF16 TFLOP/s
GPUS = {"h100": (79.0, 3350.0, 375.0, 989.0), "h200": (139.0, 4800.0, 375.0, 989.0)}
DEVICES = ("cpu", *GPUS)
LARGEST = 1e9  # upper limit of GiB and GB/s; keeps infinity out
FOR_PLAN = "With --plan"
PANEL = {"rich_help_panel": FOR_PLAN, "show_default": False}


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of --plan, per rank. memory: GiB. bandwidth, link: GB/s. None: as the device has it."""

    device: str
    ranks: int | None
    memory: float | None
    bandwidth: float | None
    link: float | None
    tokens: int
    context: int


def command(
    invoked: typer.Context,
    checkpoint: Annotated[
        str, typer.Argument(help="Checkpoint directory. With --plan its config.json is enough.")
    ],
    ranks: Annotated[
        int | None,
        typer.Option(help="Ranks that share the model.", show_default="1; with --plan the fewest"),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16.", show_default="auto")] = None,
    load_format: Annotated[
        str | None, typer.Option(help="auto, or dummy to read only config.json.", show_default="auto")
    ] = None,
    config_file: Annotated[str | None, typer.Option("--config", help="TOML file, as for serve.")] = None,
    kv_fraction: Annotated[
        float | None,
        typer.Option(
            help="Share of free memory for the KV cache.", show_default="as serve; 0.8 in a plan for GPUs"
        ),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Plan for any machine; needs no weights.")] = False,
    device: Annotated[
        str, typer.Option(help=f"{' | '.join(DEVICES)} (default cpu: this host).", **PANEL)
    ] = "cpu",
    memory_gib: Annotated[
        float | None, typer.Option(min=0.001, max=LARGEST, help="Memory of one rank.", **PANEL)
    ] = None,
    tokens: Annotated[int, typer.Option(help="Sequences decoding on each rank (default 32).", **PANEL)] = 32,
    context: Annotated[
        int, typer.Option(help="Tokens in the cache of each sequence (default 1024).", **PANEL)
    ] = 1024,
    bandwidth: Annotated[
        float | None,
        typer.Option(min=0.001, max=LARGEST, help="GB/s that one rank reads from memory.", **PANEL),
    ] = None,
    link: Annotated[
        float | None, typer.Option(min=0.001, max=LARGEST, help="GB/s from one rank to the others.", **PANEL)
    ] = None,
) -> None:
    """Show what a checkpoint contains, where its experts go, and the memory of each rank on this host.

    Only headers are read. Tensors and keys of config.json that are not used are listed. The environment and
    --config count, as for `ep-server serve`.

    With --plan it answers for any machine: the ranks that a model needs, the memory of each, and the shortest
    possible step. A plan for GPUs is a forecast from bytes and rates.
    """
    if not plan:
        options.refuse_panels(invoked, {FOR_PLAN: "with --plan"})
    for_gpus = plan and device != "cpu"
    if kv_fraction is None and for_gpus:
        kv_fraction = GPU_KV_FRACTION
    directory = str(Path(checkpoint).parent) if Path(checkpoint).name == "config.json" else checkpoint
    flags = {
        "model.path": directory,
        "parallel.ranks": ranks,
        "model.dtype": dtype,
        "model.load_format": load_format,
        "scheduler.kv_fraction": kv_fraction,
    }
    config, console = Config.load(config_file, flags), Console()
    if plan:
        config = _for_plan(config, tokens, gpus=for_gpus)
        asked = PlanOptions(device, ranks, memory_gib, bandwidth, link, tokens, context)
        _show_plan(console, config, read_spec(directory), asked)
        return
    inspected = inspect_config if config.model.load_format == "dummy" else inspect_checkpoint
    found = inspected(directory, config.model.dtype, config.model.kv_dtype)
    console.print(_facts(found))
    console.print(_parts(found))
    if message := str(found.unused):
        console.print(message, markup=False, highlight=False)
    group = plan_group(config)
    console.print(_placement(found, config, group))
    console.print(group.spares.described(config.parallel.ranks), markup=False, highlight=False)
    if group.shadow is not None:
        console.print(group.shadow.described(), markup=False, highlight=False)
    on_gpu = gpu_exchange(config, group.exchange) if config.parallel.device == "cuda" else None
    if on_gpu is not None and on_gpu.heap:
        parts = f"{_bytes(on_gpu.heap)} of each rank's exchange are for steps with many rows"
        during = f"such a step takes another {_bytes(on_gpu.step)} for a time"
        console.print(f"{parts} (exchange.mode); {during}", markup=False, highlight=False)


def _facts(found: Inspection) -> Table:
    spec = found.spec
    table = Table(title=str(spec.family), show_header=False)
    sparse = sum(spec.sparse_layers)
    rows = {
        "layers": f"{spec.num_layers}, {sparse} with experts",
        "hidden": f"{spec.hidden:,}",
        "experts": f"{spec.router.num_experts} per layer, {spec.router.top_k} per token",
        "vocabulary": f"{spec.vocab_size:,}",
        "context": f"{spec.max_context:,} tokens",
        "parameters": f"{found.total_parameters:,}, {found.active_parameters:,} active per token",
        "files": f"{len(found.shards)} shards, {found.file_bytes / MIB:,.1f} MiB"
        if found.shards
        else "not read: dummy weights",
        "served as": found.dtype + (", experts as FP8 on GPUs" if stay_fp8(spec, found.dtype) else ""),
        "KV cache": f"{found.kv_bytes_per_token:,} bytes per token, {found.kv_dtype}",
        "end of sequence": ", ".join(map(str, spec.eos_token_ids)) or "none",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _parts(found: Inspection) -> Table:
    table = Table("part", "parameters", "share", title="Parameters")
    for part, count in sorted(found.parameters.items(), key=lambda entry: -entry[1]):
        table.add_row(part, f"{count:,}", f"{count / max(found.total_parameters, 1):.1%}")
    if found.unserved:
        table.add_row("in the files, not served", f"{found.unserved:,}", "")
    return table


def _placement(found: Inspection, config: Config, plan: GroupPlan) -> Table:
    ranks = config.parallel.ranks
    owners = place_experts(found.spec.router.num_experts, ranks)
    kv_tokens = plan.kv_blocks * config.scheduler.block_size
    kv = kv_tokens * found.kv_bytes_per_token / MIB
    on_cpu = config.parallel.device == "cpu"
    exchange = exchange_bytes(config, plan.exchange, packed=on_cpu) / ranks / MIB
    table = Table(title=f"On {ranks} ranks of this host, MiB")
    for name in ("rank", "experts of each layer", "weights", f"KV cache ({kv_tokens:,} tokens)", "exchange"):
        table.add_column(name, justify="left" if name.startswith(("rank", "experts")) else "right")
    for rank in range(ranks):
        own = [expert for expert, owner in enumerate(owners) if owner == rank]
        experts = f"{own[0]} to {own[-1]} ({len(own)})" if own else "none"
        table.add_row(
            str(rank), experts, f"{plan.weight_bytes[rank] / MIB:,.1f}", f"{kv:,.1f}", f"{exchange:,.1f}"
        )
    return table


def _for_plan(config: Config, tokens: int, *, gpus: bool) -> Config:
    """All ranks as those of one node, whose memory is divided as a host's; so many sequences at once."""
    scheduler, on_gpus = config.scheduler, gpus and config.cluster.nodes == 1
    running = min(max(scheduler.max_running, tokens), MOST_RUNNING)
    steps = scheduler.max_step_tokens or (STEP_TOKENS_OF_GPUS if on_gpus else STEP_TOKENS)
    changed = {"cluster.nodes": 1, "scheduler.max_running": running, "scheduler.max_step_tokens": steps}
    return Config.from_values(config.values() | changed)


def _show_plan(console: Console, config: Config, spec: ModelSpec, options: PlanOptions) -> None:
    """Prints the plan. Raises: ConfigError; StartupError if the model does not fit."""
    limit = context_limit(spec, config.model.max_context)
    for name, value, most, field in (
        ("--tokens", options.tokens, config.step_tokens, "scheduler.max_step_tokens"),
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
    """The machine of one rank. Raises: ConfigError for an unknown device."""
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
    if (shadow := sizing.plan.shadow) is not None:
        table.caption += f"\n{shadow.described()}, of all ranks"
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
