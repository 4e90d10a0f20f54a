"""`ep-server inspect`: what a checkpoint holds and how it would be placed. Opens headers, loads nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ep_server.cli import options
from ep_server.cli.inspect_plan import DEVICES, GPU_KV_FRACTION, PlanOptions, show
from ep_server.config import Config
from ep_server.exchange.geometry import group_bytes
from ep_server.models.families import read_spec
from ep_server.models.footprint import stay_fp8
from ep_server.models.inspect import Inspection, inspect_checkpoint, inspect_config
from ep_server.ranks.group import plan_group

NAME = "inspect"
MIB = 1 << 20
LARGEST = 1e9  # GiB, GB/s: any flag of --plan is finite
FOR_PLAN = "With --plan"
PANEL = {"rich_help_panel": FOR_PLAN, "show_default": False}


def command(
    invoked: typer.Context,
    checkpoint: Annotated[
        str, typer.Argument(help="Checkpoint directory. With --plan its config.json is enough.")
    ],
    ranks: Annotated[int | None, typer.Option(help="Ranks that share the model.", show_default="1")] = None,
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
        options.refuse_panels(invoked, {FOR_PLAN: "--plan"})
    if kv_fraction is None and plan and device != "cpu":
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
        asked = PlanOptions(device, ranks, memory_gib, bandwidth, link, tokens, context)
        show(console, config, read_spec(directory), asked)
        return
    inspected = inspect_config if config.model.load_format == "dummy" else inspect_checkpoint
    found = inspected(directory, config.model.dtype, config.model.kv_dtype)
    console.print(_facts(found))
    console.print(_parts(found))
    if message := str(found.unused):
        console.print(message, markup=False, highlight=False)
    console.print(_placement(found, config))


def _facts(found: Inspection) -> Table:
    spec = found.spec
    table = Table(title=str(spec.family), show_header=False)
    sparse = sum(spec.sparse_layers)
    rows = {
        "layers": f"{spec.num_layers}, of these {sparse} with experts",
        "hidden": f"{spec.hidden:,}",
        "experts": f"{spec.router.num_experts} per layer, {spec.router.top_k} per token",
        "vocabulary": f"{spec.vocab_size:,}",
        "context": f"{spec.max_context:,} tokens",
        "parameters": f"{found.total_parameters:,}, of these {found.active_parameters:,} per token",
        "files": f"{len(found.shards)} shards, {found.file_bytes / MIB:,.1f} MiB"
        if found.shards
        else "none are read: dummy weights",
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


def _placement(found: Inspection, config: Config) -> Table:
    plan, ranks = plan_group(config), config.parallel.ranks
    kv_tokens = plan.kv_blocks * config.scheduler.block_size
    kv = kv_tokens * found.kv_bytes_per_token / MIB
    exchange = group_bytes(plan.exchange) / ranks / MIB
    table = Table(title=f"On {ranks} ranks of this host, MiB")
    for name in ("rank", "experts of each layer", "weights", f"KV cache ({kv_tokens:,} tokens)", "exchange"):
        table.add_column(name, justify="left" if name.startswith(("rank", "experts")) else "right")
    for rank in range(ranks):
        own = [expert for expert, owner in enumerate(plan.exchange.placement) if owner == rank]
        experts = f"{own[0]} to {own[-1]} ({len(own)})" if own else "none"
        table.add_row(
            str(rank), experts, f"{plan.weight_bytes[rank] / MIB:,.1f}", f"{kv:,.1f}", f"{exchange:,.1f}"
        )
    return table
