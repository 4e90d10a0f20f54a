"""Measures where a step's time goes on the device, with time stamps in its stream and its graphs.

Phases are those of models/timers.py. In a step of two micro-batches, dispatch and combine count only the time
that their hooks wait: other phases hide the rest. Units: nanoseconds, steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ep_server.backends.gpu.kernels.triton import stamps
from ep_server.backends.gpu.waiting import Snapshot
from ep_server.models.timers import Phase


@dataclass(frozen=True, slots=True)
class ClockReading:
    """Cumulative times, under the names of RankStatistics.

    histograms, sums: as in PhaseClock, for timed steps. In both, "step/device" is the time from first to
      last stamp, for all steps. In sums, "step/decode_device" is the same for captured steps of single
      tokens.
    counters: device_steps, decode_device_steps: with a first and a last stamp. timed_steps: with stamps
      between their phases.
    """

    histograms: dict[str, tuple[int, ...]]
    sums: dict[str, int]
    counters: dict[str, int]


class DeviceClock:
    """Times of the steps of one rank. One thread uses it, in the order of the steps.

    Args:
        every: the phases of one in so many steps are timed; 0 = nothing is timed at all.
    """

    def __init__(self, device: torch.device, every: int) -> None:
        self.every = every
        self._steps = 0
        self._marks = torch.zeros(2, dtype=torch.int64, device=device)
        # For other steps, and for captured steps of single tokens.
        self._busy = torch.zeros(2, 2, dtype=torch.int64, device=device)
        self._step, self._sums = (torch.zeros(len(Phase), dtype=torch.int64, device=device) for _ in range(2))
        # One row for each phase; the last row is for whole steps.
        self._counts = torch.zeros(len(Phase) + 1, stamps.BUCKETS, dtype=torch.int64, device=device)
        self._snapshot = Snapshot((self._sums, self._counts, self._busy))

    def warm_up(self) -> None:
        """Compiles the stamps outside graphs. Otherwise the first timed step would wait for that.

        Also resets all measurements.
        """
        self.begin()
        self.end(self.every > 0)
        for measured in (self._marks, self._busy, self._step, self._sums, self._counts):
            measured.zero_()

    def due(self) -> bool:
        """Whether the phases of the next step are timed. Called once per step."""
        self._steps += 1
        return self.every > 0 and self._steps % self.every == 0

    def begin(self) -> None:
        """The first stamp of a step."""
        if self.every:
            stamps.begin(self._marks, self._step)

    def lap(self, phase: Phase) -> None:
        """Ends a phase: counts the time since the previous stamp for it."""
        stamps.lap(self._marks, self._step, int(phase))

    def end(self, timed: bool, decode: bool = False) -> None:
        """The last stamp of a step. The time since the previous one counts as sampling.

        decode: whether it was captured and had only single tokens.
        """
        if not self.every:
            return
        if timed:
            self.lap(Phase.SAMPLE)
        stamps.end(self._marks, self._busy[int(decode)], self._counts[-1])
        if timed:
            stamps.record_times(self._step, self._sums, self._counts[:-1])

    def read(self) -> ClockReading:
        """Measurements so far. Does not wait for steps in flight, which may or may not be included."""
        sums, counts, busy = (copy.tolist() for copy in self._snapshot.take())
        names = [*(f"step/{phase.name.lower()}" for phase in Phase), "step/device"]
        histograms = {name: tuple(row) for name, row in zip(names, counts, strict=True)}
        read = ClockReading(histograms, dict(zip(names, sums, strict=False)), {})
        (other_ns, others), (decode_ns, decodes) = busy
        if others or decodes:
            read.sums.update({"step/device": other_ns + decode_ns, "step/decode_device": decode_ns})
        if self.every:
            timed = sum(counts[Phase.SAMPLE])
            read.counters.update(
                device_steps=others + decodes, decode_device_steps=decodes, timed_steps=timed
            )
        return read
