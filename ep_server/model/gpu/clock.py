"""Where a step's time goes on the device: stamps in its stream, some of them in the graph, read now and then.

Phases are those of model/timers.py. In a step of two micro-batches dispatch and combine are what their hooks
wait for: the rest of them is hidden behind other phases. Units: nanoseconds, steps.
"""

from __future__ import annotations

import torch

from ep_server.model.timers import Phase
from ep_server.model.triton import stamps


class DeviceClock:
    """Times of the steps of one rank. One thread uses it, in the order of the steps.

    Args:
        every: of so many steps the phases of one are timed; 0 = nothing is timed at all.
    """

    def __init__(self, device: torch.device, every: int) -> None:
        self.every = every
        self._steps = 0
        self._marks, self._busy = (torch.zeros(2, dtype=torch.int64, device=device) for _ in range(2))
        self._step, self._sums = (torch.zeros(len(Phase), dtype=torch.int64, device=device) for _ in range(2))
        self._counts = torch.zeros(len(Phase), stamps.BUCKETS, dtype=torch.int64, device=device)

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

    def end(self, timed: bool) -> None:
        """The last stamp of a step. What ran since the last one was sampling."""
        if not self.every:
            return
        if timed:
            self.lap(Phase.SAMPLE)
        stamps.end(self._marks, self._busy)
        if timed:
            stamps.settle(self._step, self._sums, self._counts)

    def histograms(self) -> dict[str, tuple[int, ...]]:
        """As PhaseClock.histograms, of the timed steps. Waits for the steps in flight, as the others do."""
        counts = self._counts.tolist()
        return {f"step/{p.name.lower()}": tuple(counts[p]) for p in Phase}

    def sums(self) -> dict[str, int]:
        """As PhaseClock.sums, of the timed steps; "step/device" is first to last stamp of all steps."""
        sums, busy = self._sums.tolist(), int(self._busy[0])
        return {f"step/{p.name.lower()}": sums[p] for p in Phase} | ({"step/device": busy} if busy else {})

    def counters(self) -> dict[str, int]:
        """device_steps: with a first and a last stamp. timed_steps: with stamps between their phases."""
        steps, timed = int(self._busy[1]), int(self._counts[Phase.SAMPLE].sum())
        return {"device_steps": steps, "timed_steps": timed} if self.every else {}
