"""How the demo shows things: loading, answers, latencies. On a terminal with bars, elsewhere as plain lines.

Knows rich and records of the demo; starts and asks nothing. Units: seconds, tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ep_server.sums import Sum, parse_answer

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


class Bars:
    """Named bars below the lines that are printed; without a terminal, a line whenever one is full."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._full: set[str] = set()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, name: str, done: int, total: int) -> None:
        """Sets one bar; the first call with a name adds it."""
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total)
        self._progress.update(self._tasks[name], completed=done, total=total)
        if done >= total and name not in self._full:
            self._full.add(name)
            if not self._console.is_terminal:
                self._console.print(f"{name}: {done}/{total}")

    def loading(self, rank: int, stage: str, done: int, total: int) -> None:
        """The progress callback of a starting server."""
        self.show(f"rank {rank} {stage}", done, total)


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
