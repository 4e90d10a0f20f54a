"""How the demo shows things: answers, speed, latencies.

Knows rich and records of the demo; starts and asks nothing. Units: seconds, tokens.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ep_server.cli.demo.sums import Sum, parse_answer

PARTS = {
    "dispatch": ("send", "wait", "expand", "total"),
    "combine": ("send", "wait", "reduce", "total"),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model wrote, in so many tokens."""

    sum: Sum
    text: str
    tokens: int

    @property
    def right(self) -> bool:
        """Python says the same."""
        return parse_answer(self.text) == self.sum.answer


class Output(Console):
    """Standard output. Its reader may leave (`| head`): what follows is shown to nobody, and is no error."""

    def __init__(self) -> None:
        super().__init__(highlight=False)

    def on_broken_pipe(self) -> None:
        """Where rich would end the program, in the middle of a callback."""
        self.quiet = True
        with Path(os.devnull).open("wb") as nowhere:  # for what is still buffered
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def answer_line(answer: Answer) -> Text:
    """`a + b = c`, and whether that is so."""
    asked = answer.sum
    line = f"{asked.a:>5} {asked.op} {asked.b:>3} = {answer.text.strip():<5}"
    if answer.right:
        return Text(line).append(" ok", "green")
    return Text(line).append(f" wrong, it is {asked.answer}", "red")


def speed_line(answers: Iterable[Answer], seconds: float) -> str:
    """How many are right, how many tokens they took, and how fast those came."""
    several = list(answers)
    right, tokens = sum(each.right for each in several), sum(each.tokens for each in several)
    rate = f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f} tokens/s"
    return f"{right} of {len(several)} right; {rate}"


def latency_table(state: Any) -> Table:
    """Dispatch and combine by part, over all ranks, from a GetEpStateResponse."""
    table = Table(title="dispatch and combine, all ranks, microseconds", title_justify="left")
    for heading in ("operation", "part"):
        table.add_column(heading)
    for heading in ("count", "mean", "p50", "p99"):
        table.add_column(heading, justify="right")
    measured = {(each.op, each.part): each for each in state.latencies}
    for op, parts in PARTS.items():
        for part in parts:
            if (row := measured.get((op, part))) is not None:
                times = (row.mean_seconds, row.p50_seconds, row.p99_seconds)
                table.add_row(op, part, f"{row.count:,}", *(f"{seconds * 1e6:,.0f}" for seconds in times))
        table.add_section()
    return table
