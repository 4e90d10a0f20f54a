"""What the exchange benchmark on GPUs has found: a row as text and as JSON. Knows no GPU.

The file is written anew after each row, so a run that is cut off leaves all rows that it printed.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from exchange_case import Case
from exchange_timing import Time

OWN = ("dispatch", "combine", "pair", "halves")
NCCL = ("AG+RS", "A2A")
HEAD = " ".join(("EP    T routing   form  wire", *(f"{name:>15}" for name in OWN), "  KB out  bound     %"))


@dataclass
class Row:
    """One line of the table. times_us: by name of OWN and NCCL; the rest as exchange_cuda.py says."""

    case: Case
    times_us: dict[str, Time] = field(default_factory=dict)
    parts_us: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    kb_out: float = 0.0
    bound_us: float = 0.0
    memory_mb: float = 0.0

    def lines(self) -> list[str]:
        """The exchange's own figures, and below them parts, memory and errors."""
        case, by_op = self.case, {}
        times = [f"{self.times_us.get(name, '-')!s:>15}" for name in OWN]
        share = 100 * self.bound_us / self.times_us["pair"].median
        for name, us in self.parts_us.items():  # "pair dispatch/send" and so on
            op, _, part = name.partition("/")
            by_op[op] = f"{by_op.get(op, op + ':')} {part} {us:.1f}"
        errors = "  ".join(f"{name} {error:.2e}" for name, error in self.errors.items())
        return [
            " ".join((name_of(case), *times, f"{self.kb_out:8.0f} {self.bound_us:6.1f} {share:5.1f}")),
            "      " + "; ".join(by_op.values()),
            f"      memory {self.memory_mb:.1f} MiB; error against float64 sums: {errors}",
        ]

    def beside(self) -> str:
        """NCCL's figures."""
        return "      NCCL: " + ", ".join(f"{name} {self.times_us[name]}" for name in NCCL)


def name_of(case: Case) -> str:
    """As the first columns of a row have it."""
    return f"{case.ranks:2} {case.tokens:4} {case.routing:>7} {case.form:>6} {case.wire:>5}"


class Report:
    """Rows as they come: printed, and in a file if there is a path. began: time.time() of the start."""

    def __init__(self, machine: dict[str, str], path: str, began: float) -> None:
        self._machine, self._path, self._began = machine, Path(path) if path else None, began
        self._rows: list[Row] = []

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.time() - self._began

    def say(self, what: str) -> None:
        """A line about how far the run has come."""
        print(f"[{self.seconds:4.0f} s] {what}", flush=True)

    def own(self, row: Row) -> None:
        """A row without NCCL, which may still come."""
        self._rows.append(row)
        print(*row.lines(), sep="\n", flush=True)
        self._write()

    def beside(self, row: Row) -> None:
        """NCCL's figures of the last row."""
        print(row.beside(), flush=True)
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        found: dict[str, Any] = self._machine | {"rows": [asdict(row) for row in self._rows]}
        made = self._path.with_name(self._path.name + ".new")
        made.write_text(json.dumps(found, indent=1) + "\n")
        made.replace(self._path)
