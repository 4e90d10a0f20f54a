"""The last steps of all ranks as a trace for Perfetto and chrome://tracing, one track per rank. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

PARTS = ("plan", "vote", "run", "publish")


class Step(Protocol):
    """One step of one rank; fields as of records.StepTrace."""

    rank: int
    step: int
    start_ns: int
    tokens: int
    sequences: int
    micro_batches: int


def chrome_trace(steps: Iterable[Step]) -> dict[str, Any]:
    """Trace events; times in microseconds since the earliest step. vote holds the wait for slower ranks."""
    known = list(steps)
    origin = min((step.start_ns for step in known), default=0)
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({step.rank for step in known})
    ]
    return {"traceEvents": [*names, *(event for step in known for event in _events(step, origin))]}


def _events(step: Step, origin: int) -> Iterable[dict[str, Any]]:
    begin = step.start_ns - origin
    facts = {
        "step": step.step,
        "tokens": step.tokens,
        "sequences": step.sequences,
        "micro_batches": step.micro_batches,
    }
    for part in PARTS:
        length = getattr(step, f"{part}_ns")
        where = {"ph": "X", "pid": 0, "tid": step.rank, "ts": begin / 1e3, "dur": length / 1e3}
        yield {"name": part, **where, "args": facts}
        begin += length
