"""What `ep-server chaos` found, as tables or for --json. Durations in seconds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

LOST = "lost rank", "other ranks", "all ranks"  # whose requests gaps are; the last: no rank was left


@dataclass(slots=True)
class Report:
    """What was found.

    differences, errors, left: one line each; left: what the server still holds at the end.
    gaps: the longest one of each sequence during each loss and change, in seconds.
    pauses: of each change, as the server reports them.
    first_tokens: seconds to the first token of each stream. handed_off: streams whose prompt came from a
        prefill server, of those without a prefix cache. host_tokens: prompt tokens that only host tiers held.
    same_tokens: streams with the tokens of the undisturbed run, however scores round.
    elsewhere: ranks on other machines, which nothing was done to. memory_mib: of the server's processes here,
        before and after.
    """

    exact: bool
    streams: int = 0
    rounds: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    recoveries: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    gaps: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in ("undisturbed", *LOST, "change")}
    )
    pauses: list[float] = field(default_factory=list)
    first_tokens: dict[str, list[float]] = field(default_factory=lambda: {"undisturbed": [], "losses": []})
    handed_off: int = 0
    host_tokens: int = 0
    elsewhere: list[int] = field(default_factory=list)
    same_tokens: int = 0
    memory_mib: tuple[float, float] = (0.0, 0.0)

    @property
    def good(self) -> bool:
        """No stream showed a fault, and nothing is left."""
        return not (self.errors or self.differences or self.left)


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p99 and max; empty without values."""
    if not values:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return {"p50": cuts[49], "p99": cuts[98], "max": max(values)}


def as_dict(report: Report) -> dict[str, Any]:
    """For --json; durations in seconds."""
    return {
        "good": report.good,
        "exact": report.exact,
        "streams": report.streams,
        "rounds": report.rounds,
        "faults": report.faults,
        "errors": report.errors,
        "differences": report.differences,
        "left": report.left,
        "recovery_seconds": quantiles(report.recoveries),
        "pause_seconds": quantiles(report.pauses),
        "longest_gap_seconds": {name: quantiles(values) for name, values in report.gaps.items()},
        "first_token_seconds": {name: quantiles(values) for name, values in report.first_tokens.items()},
        "handed_off": report.handed_off,
        "host_tokens": report.host_tokens,
        "ranks_elsewhere": report.elsewhere,
        "same_tokens": report.same_tokens,
        "memory_mib": report.memory_mib,
    }


def show(report: Report, console: Console) -> None:
    """As tables."""
    faults = ", ".join(f"{count} x {kind}" for kind, count in report.faults.items() if count)
    rule = "to the last bit" if report.exact else "the number of tokens"
    console.print(f"{report.streams} streams in {report.rounds} rounds: {faults}")
    console.print(f"compared with an undisturbed run: {rule}")
    if report.elsewhere:
        console.print(f"ranks {report.elsewhere} run on other machines: nothing was done to them")
    if report.handed_off:
        console.print(f"{report.handed_off} prompts without a prefix cache were handed off")
    if report.host_tokens:
        console.print(f"{report.host_tokens} prompt tokens came from host tiers")
    table = Table("seconds", "p50", "p99", "max")
    rows = {"recovery": report.recoveries, "pause of a change": report.pauses}
    rows |= {f"longest gap, {k}": v for k, v in report.gaps.items()}
    rows |= {f"first token, {k}": v for k, v in report.first_tokens.items()}
    for name, values in rows.items():
        if values:
            table.add_row(name, *(f"{value:.2f}" for value in quantiles(values).values()))
    console.print(table)
    console.print("memory of the server: {:.0f} MiB before, {:.0f} after".format(*report.memory_mib))
    problems = {"error": report.errors, "different": report.differences, "left": report.left}
    for word, lines in problems.items():
        for line in lines:
            console.print(f"[red]{word}[/]: {line}", soft_wrap=True)
    console.print("no stream shows a fault" if report.good else "[red]streams show faults[/]")
