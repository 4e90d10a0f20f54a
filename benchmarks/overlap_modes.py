"""What the ranks of overlap_delay.py measure, on CPUs and on GPUs, and what is made of it. Times: ms."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ep_server.ranks.overlap import FixedOverlap, MeasuredOverlap, Overlap

RANKS, BLOCK = 2, 16
MODES = ("off", "on", "auto")


@dataclass(frozen=True, slots=True)
class Plan:
    """delays: one way, ms; the first is 0. steps: of off and on in a round. auto_steps: of auto in a round.

    tokens: sequences of each rank. domain: interface of ranks on CPUs; "" = hosts of their own.
    """

    domain: str
    delays: tuple[float, ...]
    tokens: int
    rounds: int
    steps: int
    auto_steps: int

    def steps_of(self, mode: str) -> int:
        """Of a round."""
        return self.auto_steps if mode == "auto" else self.steps


@dataclass(slots=True)
class Measured:
    """One mode at one delay, by step. times: ms. ways: number of micro-batches. drawn: digests of tokens."""

    times: list[float] = field(default_factory=list)
    ways: list[int] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """ms of a step."""
        return statistics.fmean(self.times)

    def add(self, ns: int, micro_batches: int, tokens: Sequence[int]) -> None:
        """One step."""
        self.times.append(ns / 1e6)
        self.ways.append(micro_batches)
        self.drawn.append(hashlib.sha256(str(list(tokens)).encode()).hexdigest())


Table = dict[tuple[float, str], Measured]
Step = Callable[[Overlap, Measured], None]


def policies_of(rank: int, graphs: Iterable[int] | None = None) -> dict[str, Overlap]:
    """By mode, as a server with this parallel.overlap has it. graphs: see MeasuredOverlap."""
    measured = MeasuredOverlap(graphs) if rank == 0 else FixedOverlap(two=True)
    return {"off": FixedOverlap(two=False), "on": FixedOverlap(two=True), "auto": measured}


def measure_rounds(
    plan: Plan, delay: float, policies: dict[str, Overlap], step: Step, start: Callable[[], object]
) -> Table:
    """All modes at one delay, in turns. Collective.

    Args:
        policies: by mode. step: runs one step with a policy and adds it. start: called before the steps of a
          mode in a round.
    """
    table = {(delay, mode): Measured() for mode in MODES}
    for mode in ("off", "on"):  # warm
        for _ in range(5):
            step(policies[mode], Measured())
    for _ in range(plan.rounds):
        for mode in MODES:
            start()
            for _ in range(plan.steps_of(mode)):
                step(policies[mode], table[delay, mode])
    return table


def check_same(plan: Plan, tables: list[Table]) -> str:
    """All modes at all delays drew the same tokens, step by step. Raises SystemExit. Returns: a summary."""
    for rank, table in enumerate(tables):
        expected = table[plan.delays[0], "off"].drawn[: plan.steps]
        for (delay, mode), measured in table.items():
            per_round = plan.steps_of(mode)
            for start in range(0, len(measured.drawn), per_round):
                compared = measured.drawn[start : start + min(per_round, plan.steps)]
                if compared != expected[: len(compared)]:
                    raise SystemExit(f"rank {rank}, {delay} ms, overlap {mode}: other tokens than with off")
    return "all modes drew the same tokens"


def check_same_by_way(tables: list[Table]) -> str:
    """Steps that are alike but for mode and delay drew the same tokens, if they ran as many micro-batches.

    Two micro-batches may round differently from one. Raises SystemExit. Returns: a summary.
    """
    differ = False
    for rank, table in enumerate(tables):
        expected: dict[int, str] = {}
        for (delay, mode), measured in table.items():
            for step, (way, drawn) in enumerate(zip(measured.ways, measured.drawn, strict=True)):
                if expected.setdefault(way, drawn) != drawn:
                    where = f"rank {rank}, {delay} ms, overlap {mode}, step {step}"
                    raise SystemExit(f"{where}: other tokens than before, in {way} micro-batches")
        differ |= len(set(expected.values())) > 1
    both = "other tokens than one, by rounding" if differ else "the same as one"
    return f"all delays and modes drew the same tokens; two micro-batches drew {both}"


def report(plan: Plan, table: Table) -> None:
    """Rank 0's steps; W and C2: docs/concepts/overlap.md. unstable: other work cost more than the delay."""
    base_off, base_on = (table[0.0, mode].mean for mode in ("off", "on"))
    print(f"C2 = {base_on:.2f} ms: two micro-batches, no delay; one micro-batch: {base_off:.2f} ms")
    print(
        "delay     off      on    auto  two in auto       W   hidden  hidden / min(W, C2/2)   auto / better"
    )
    for delay in plan.delays:
        off, on, auto = (table[delay, mode] for mode in MODES)
        wait = off.mean - base_off
        hidden = wait - (on.mean - base_on)
        most = min(wait, base_on / 2)
        share = "       -" if not delay else "unstable" if most <= 0 else f"{hidden / most:8.2f}"
        print(
            f"{delay:5.2f} {off.mean:7.2f} {on.mean:7.2f} {auto.mean:7.2f}"
            f" {auto.ways.count(2) / len(auto.ways):12.1%} {wait:7.2f} {hidden:8.2f} {share:>23}"
            f" {auto.mean / min(off.mean, on.mean):15.3f}"
        )
