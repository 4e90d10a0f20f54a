"""The clock of a device keeps the books of the CPU engine's. tests/gpu has the time that a GPU tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ep_server.backends.gpu.clock import DeviceClock
from ep_server.backends.gpu.kernels.triton import stamps
from ep_server.models import timers
from ep_server.models.timers import Phase, PhaseClock
from tests.support.observability.reports import bucketed
from tests.support.triton.harness import DEVICE, INTERPRETED

interpreted = pytest.mark.skipif(not INTERPRETED, reason="the time is told by the test")
# By step: phases and how long each took, ns; one of more than 32 bits, one of no time at all.
STEPS = [
    [(Phase.ATTENTION, 5), (Phase.EXPERTS, 1 << 40), (Phase.ATTENTION, 3), (Phase.SAMPLE, 1)],
    [(Phase.ATTENTION, 8), (Phase.COMBINE, 0), (Phase.SAMPLE, (1 << 20) - 1)],
]


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Moves the clock of both, which stands still by itself."""
    now = [1 << 50]

    def pass_(ns: int) -> None:
        now[0] += ns

    for module in (timers, stamps):
        monkeypatch.setattr(module, "perf_counter_ns", lambda: now[0])
    return pass_


def run(clock: DeviceClock, steps: list[list[tuple[Phase, int]]], pass_time: Callable[[int], None]) -> None:
    """Steps as a runner takes them; the last phase is that which end() laps."""
    for step in steps:
        timed = clock.due()
        clock.begin()
        for phase, ns in step[:-1]:
            pass_time(ns)
            if timed:
                clock.lap(phase)
        pass_time(step[-1][1])
        clock.end(timed)
        pass_time(1000)  # between two steps


@interpreted
def test_the_same_books_as_on_the_cpu(pass_time: Callable[[int], None]) -> None:
    clock, expected = DeviceClock(DEVICE, 1), PhaseClock()
    clock.begin()
    clock.lap(Phase.ROUTER)  # a graph was captured: no step of anybody
    run(clock, STEPS, pass_time)
    for step in STEPS:
        expected.start()
        for phase, ns in step:
            pass_time(ns)
            expected.lap(phase)
        expected.finish()
    lengths = [sum(ns for _, ns in step) for step in STEPS]
    busy, whole = sum(lengths), bucketed(lengths, stamps.BUCKETS)
    assert clock.read().histograms == expected.histograms() | {"step/device": whole}
    assert clock.read().sums == expected.sums() | {"step/device": busy, "step/decode_device": 0}
    assert clock.read().counters == {"device_steps": 2, "decode_device_steps": 0, "timed_steps": 2}


@interpreted
def test_one_step_in_so_many_has_phases_and_every_one_a_length(pass_time: Callable[[int], None]) -> None:
    clock = DeviceClock(DEVICE, 3)
    run(clock, [[(Phase.EXPERTS, 10), (Phase.SAMPLE, 1)]] * 7, pass_time)
    sums = clock.read().sums
    assert clock.read().histograms["step/device"] == bucketed([11] * 7, stamps.BUCKETS)
    assert (sums["step/experts"], sums["step/sample"], sums["step/device"]) == (20, 2, 77)
    assert clock.read().counters == {"device_steps": 7, "decode_device_steps": 0, "timed_steps": 2}


@interpreted
def test_captured_steps_are_counted_apart_too(pass_time: Callable[[int], None]) -> None:
    clock = DeviceClock(DEVICE, 9)
    for graph, ns in ((False, 100), (True, 7), (True, 8)):
        clock.begin()
        pass_time(ns)
        clock.end(False, graph)
    read = clock.read()
    assert (read.sums["step/device"], read.sums["step/decode_device"]) == (115, 15)
    assert read.counters == {"device_steps": 3, "decode_device_steps": 2, "timed_steps": 0}


def test_a_clock_that_is_off_takes_no_stamp(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("begin", "lap", "end", "record_times"):
        monkeypatch.delattr(stamps, name)
    clock = DeviceClock(DEVICE, 0)
    run(clock, STEPS, lambda ns: None)
    assert clock.read().counters == {} and "step/device" not in clock.read().sums
    assert not any(clock.read().sums.values()) and not any(map(any, clock.read().histograms.values()))


@pytest.mark.parametrize("every", [0, 3])
def test_all_stamps_are_warm_before_the_first_step(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those after a graph too, which a capture does not reach; and nothing of it is counted."""
    launched = []
    for name in ("_begin_kernel", "_lap_kernel", "_end_kernel", "_record_times_kernel"):
        monkeypatch.setattr(stamps, name, Noting(name, getattr(stamps, name), launched))
    clock = DeviceClock(DEVICE, every)
    clock.warm_up()
    expected = [("_begin_kernel", None), ("_lap_kernel", Phase.SAMPLE), ("_end_kernel", None)]
    assert launched == ([*expected, ("_record_times_kernel", None)] if every else [])
    assert not any(clock.read().sums.values()) and not any(clock.read().counters.values())
    assert not any(map(any, clock.read().histograms.values()))


class Noting:
    """A kernel; notes its launches, with the phase that one is compiled for."""

    def __init__(self, name: str, kernel: Any, launched: list[tuple[str, int | None]]) -> None:
        self._name, self._kernel, self._launched = name, kernel, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self._launched.append((self._name, kwargs.get("PHASE")))
            self._kernel[grid](*args, **kwargs)

        return launch
