"""`ep-server placement`: where the experts of a running server are; a file to start others like it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ep_server.cli import options
from ep_server.client import Client
from ep_server.errors import Unavailable
from ep_server.scheduler.balance import imbalance, rank_rows
from ep_server.scheduler.placement import Placement, covers_any_loss
from ep_server.scheduler.placement_file import placement_values

NAME = "placement"
SHADES = " ░▒▓█"


def command(
    export: Annotated[
        str,
        typer.Option(
            "--export", metavar="FILE", help="Write the placement to a file, for resilience.placement."
        ),
    ] = "",
    address: options.Address = options.ADDRESS,
    tls_ca: options.TlsCa = "",
    tls_cert: options.TlsCert = "",
    tls_key: options.TlsKey = "",
    token_file: options.TokenFile = "",
) -> None:
    """Show where the experts of a running server are: by layer, copies, spare copies and the load of ranks.

    Loads are rows that the balance has counted (resilience.balance = auto), over their mean.
    """
    with Client(options.target(address, tls_ca, tls_cert, tls_key, token_file)) as client:
        answer = client.placement()
    if not answer.slots_per_rank:
        raise Unavailable(
            "experts stay where they are: this server has no spare slots (resilience.spare_slots)"
        )
    placement = Placement(
        answer.num_experts,
        answer.slots_per_rank,
        tuple(tuple(layer.experts) for layer in answer.layers),
        tuple(tuple(layer.serves) for layer in answer.layers),
    )
    if export:
        Path(export).write_text(json.dumps(placement_values(placement)) + "\n", encoding="utf-8")
    rows = [list(layer.rows) for layer in answer.layers]
    show(Console(), placement, tuple(answer.live), rows)


def show(
    console: Console, placement: Placement, live: Sequence[int], rows: Sequence[Sequence[float]]
) -> None:
    """Prints the table. rows: by layer, by expert; an empty layer was not counted."""
    every = "every expert" if covers_any_loss(placement, live) else "not every expert"
    console.print(
        f"{placement.num_experts} experts in {placement.slots_per_rank} slots on each of ranks "
        f"{', '.join(map(str, live))}: {every} is on two or more ranks"
    )
    table = Table(box=None)
    names = ("layer", "max / mean", "experts served by rank", "with copies", "spare copies", "load of ranks")
    for name in names:
        table.add_column(name, justify="left" if name == names[-1] else "right")
    for layer in range(len(placement.experts)):
        table.add_row(str(layer), *_cells(placement, layer, live, rows[layer]))
    console.print(table)


def _cells(placement: Placement, layer: int, live: Sequence[int], rows: Sequence[float]) -> Iterator[str]:
    per, held, serves = placement.slots_per_rank, placement.experts[layer], placement.serves[layer]
    slots = [slot for slot in range(len(held)) if held[slot] >= 0 and slot // per in live]
    serving = [slot for slot in slots if serves[slot]]
    by_rank = [sum(slot // per == rank for slot in serving) for rank in live]
    copies = len(serving) - len({held[slot] for slot in serving})
    loads = list(rank_rows(rows, placement, layer, live).values()) if any(rows) else []
    yield f"{imbalance(loads):.3f}" if loads else "-"
    yield f"{min(by_rank)} to {max(by_rank)}"
    yield str(copies)
    yield str(len(slots) - len(serving))
    yield heat(loads)


def heat(loads: Sequence[float]) -> str:
    """One character for each rank: empty at half of the mean or less, full at one and a half or more."""
    mean = sum(loads) / len(loads) if loads else 0.0
    steps: list[Any] = [
        min(max((load / mean - 0.5) * (len(SHADES) - 1), 0), len(SHADES) - 1) for load in loads
    ]
    return "".join(SHADES[round(step)] for step in steps)
