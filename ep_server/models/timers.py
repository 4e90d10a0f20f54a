"""Where a step's time goes: one duration per phase and step, counted into log2 buckets.

A phase's laps over all layers and micro-batches of a step add up to one duration. Units: nanoseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from time import perf_counter_ns


class Phase(IntEnum):
    """Phases of a forward pass; lower-case names are those of RankStatistics."""

    ATTENTION = 0
    ROUTER = 1
    DISPATCH = 2
    EXPERTS = 3
    COMBINE = 4
    SAMPLE = 5


# From the router to the residual: a MoE layer. Dense layers of such a model count as experts too.
MOE_PHASES = (Phase.ROUTER, Phase.DISPATCH, Phase.EXPERTS, Phase.COMBINE)
Lap = Callable[[Phase], None]  # what ran since the last lap was this phase


def moe_counters(
    histograms: Mapping[str, Sequence[int]], sums: Mapping[str, int], sparse_layers: int
) -> dict[str, int]:
    """Counters of RankStatistics: MoE layers of the timed steps, and the time that they took, ns."""
    steps = sum(histograms.get(f"step/{Phase.ROUTER.name.lower()}", ()))
    spent = sum(sums.get(f"step/{phase.name.lower()}", 0) for phase in MOE_PHASES)
    return {"moe_layers": steps * sparse_layers, "moe_layer_ns": spent}


def no_lap(phase: Phase) -> None:
    """For steps that are not timed."""


class PhaseClock:
    """Lap times of the phases of a step. Bucket b counts durations in [2^b, 2^(b+1)) ns."""

    BUCKETS = 64

    def __init__(self) -> None:
        self._last = 0
        self._step = [0] * len(Phase)
        self._sums = [0] * len(Phase)
        self._counts = [[0] * self.BUCKETS for _ in Phase]

    def start(self) -> None:
        """A step begins: the first lap counts from here."""
        self._last = perf_counter_ns()

    def lap(self, phase: Phase) -> None:
        """Adds the time since the last lap to a phase."""
        now = perf_counter_ns()
        self._step[phase] += now - self._last
        self._last = now

    def finish(self) -> None:
        """The step ended: its durations enter the histograms; phases that did not run do not count."""
        for phase, duration in enumerate(self._step):
            if duration:
                self._counts[phase][duration.bit_length() - 1] += 1
                self._sums[phase] += duration
                self._step[phase] = 0

    def histograms(self) -> dict[str, tuple[int, ...]]:
        """Counts per bucket by "step/<phase>", cumulative."""
        return {f"step/{p.name.lower()}": tuple(self._counts[p]) for p in Phase}

    def sums(self) -> dict[str, int]:
        """Sum of the durations by "step/<phase>", cumulative, ns."""
        return {f"step/{p.name.lower()}": self._sums[p] for p in Phase}
