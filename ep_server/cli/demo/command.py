"""`ep-server demo`: flags only; what it does is ep_server.cli.demo.run."""

from __future__ import annotations

from typing import Annotated

import typer

NAME = "demo"


def command(
    ranks: Annotated[int, typer.Option(min=1, max=64, help="Rank processes.")] = 4,
    questions: Annotated[int, typer.Option(min=1, help="Sums to ask.")] = 20,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the sums. Default: random, and printed.", show_default=False)
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep serving until interrupted.")] = False,
) -> None:
    """Serve a small model that adds and subtracts, ask it sums, and show the latency of each part."""
    from ep_server.cli.demo.run import DemoOptions, main

    raise typer.Exit(main(DemoOptions(ranks=ranks, seed=seed, questions=questions, keep=keep)))
