"""`ep-server inspect`: what a checkpoint holds and how it would be placed. Opens headers, loads nothing."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ep_server.model.inspect import Inspection, inspect_checkpoint
from ep_server.scheduler.placement import place_experts

NAME = "inspect"
MIB = 1 << 20


def command(
    checkpoint: Annotated[str, typer.Argument(help="Hugging Face checkpoint directory.")],
    ranks: Annotated[int, typer.Option(min=1, max=64, help="Ranks to place it on.")] = 1,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
) -> None:
    """Show what a checkpoint holds, where its experts would go, and the memory of each rank."""
    found = inspect_checkpoint(checkpoint, dtype)
    console = Console()
    console.print(_facts(found))
    console.print(_parts(found))
    console.print(_placement(found, ranks))


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
        "files": f"{len(found.shards)} shards, {found.file_bytes / MIB:,.1f} MiB",
        "served as": found.dtype,
        "KV cache": f"{found.kv_bytes_per_token:,} bytes per token",
        "end of sequence": ", ".join(map(str, spec.eos_token_ids)) or "none",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _parts(found: Inspection) -> Table:
    table = Table("part", "parameters", "share", title="Parameters")
    for part, count in sorted(found.parameters.items(), key=lambda entry: -entry[1]):
        table.add_row(part, f"{count:,}", f"{count / max(found.total_parameters, 1):.1%}")
    if found.unused:
        table.add_row("in the files, not served", f"{found.unused:,}", "")
    return table


def _placement(found: Inspection, ranks: int) -> Table:
    owners = place_experts(found.spec.router.num_experts, ranks)
    weights = found.rank_bytes(owners, ranks)
    table = Table("rank", "experts of each layer", "weights, MiB", title=f"On {ranks} ranks")
    for rank in range(ranks):
        own = [expert for expert, owner in enumerate(owners) if owner == rank]
        text = f"{own[0]} to {own[-1]} ({len(own)})" if own else "none"
        table.add_row(str(rank), text, f"{weights[rank] / MIB:,.1f}")
    return table
