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
    """Cumulative, under the names of RankStatistics.

    histograms: as PhaseClock.histograms, of the timed steps. sums: as PhaseClock.sums, of the timed steps.
      In both "step/device" is first to last stamp of all steps; in sums "step/decode_device" of captured
      ones of single tokens.
    counters: device_steps, decode_device_steps: with a first and a last stamp. timed_steps: with stamps
      between their phases.
    """

    histograms: dict[str, tuple[int, ...]]
    sums: dict[str, int]
    counters: dict[str, int]


class DeviceClock:
    """Times of the steps of one rank. One thread uses it, in the order of the steps.

    Args:
        every: of so many steps the phases of one are timed; 0 = nothing is timed at all.
    """

    def __init__(self, device: torch.device, every: int) -> None:
        self.every = every
        self._steps = 0
        self._marks = torch.zeros(2, dtype=torch.int64, device=device)
        # Of others, of captured ones of single tokens.
        self._busy = torch.zeros(2, 2, dtype=torch.int64, device=device)
        self._step, self._sums = (torch.zeros(len(Phase), dtype=torch.int64, device=device) for _ in range(2))
        # Of each phase, and in the last row of whole steps.
        self._counts = torch.zeros(len(Phase) + 1, stamps.BUCKETS, dtype=torch.int64, device=device)
        self._snapshot = Snapshot((self._sums, self._counts, self._busy))

    def warm_up(self) -> None:
        """Compiles the stamps that lie in no graph: the first timed step would else wait for that.

        It forgets what was measured so far.
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
        """What ran on this stream since the last stamp was this phase."""
        stamps.lap(self._marks, self._step, int(phase))

    def end(self, timed: bool, decode: bool = False) -> None:
        """The last stamp of a step. What ran since the last one was sampling.

        decode: it was captured, and of single tokens alone.
        """
        if not self.every:
            return
        if timed:
            self.lap(Phase.SAMPLE)
        stamps.end(self._marks, self._busy[int(decode)], self._counts[-1])
        if timed:
            stamps.record_times(self._step, self._sums, self._counts[:-1])

    def read(self) -> ClockReading:
        """What was measured so far. Waits for no step in flight: of these some may be in it and some not."""
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
