"""Which reports of the ranks are of the part of a run in which all sequences decode."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from ep_server.cli.bench.load import OK, Trace
from ep_server.cli.bench.offline import LEAST_STEPS, Window
from ep_server.engine.engine import Engine
from ep_server.records import RankStatistics

MS = 10**6


def report(rank: int, steps: int, spent: int) -> RankStatistics:
    """After so many steps, of so many ms in all."""
    counters = {"run_steps": steps, "tokens": steps}
    return RankStatistics(rank, sums={"step/total": spent * MS}, counters=counters)


class Run:
    """Of two ranks and three sequences."""

    def __init__(self) -> None:
        self.traces = [Trace(index, 9, 0.0) for index in range(3)]
        self.reports = {rank: report(rank, 10, 1000) for rank in range(2)}
        self.window = Window(cast(Engine, SimpleNamespace(rank_statistics=self.reports)), self.traces)

    def decode(self) -> None:
        """All of them, from now on."""
        for trace in self.traces:
            trace.arrivals.append((1.0, 1))

    def told(self, *reports: RankStatistics) -> bool:
        self.reports.update({each.rank: each for each in reports})
        return self.window.look()

    def seconds(self) -> float | None:
        steps = self.window.steps(1)
        return None if steps is None else steps.seconds


@pytest.fixture
def run() -> Run:
    return Run()


def test_only_reports_surely_inside_the_window_count(run: Run) -> None:
    assert run.window.look()
    run.decode()
    assert run.told(report(0, 11, 2000))  # perhaps made before
    assert run.told(report(0, 20, 3000))  # rank 1 has not told yet
    assert run.seconds() is None
    assert run.told(report(1, 20, 3000))
    assert run.seconds() is None  # a begin without an end
    assert run.told(report(0, 20 + LEAST_STEPS, 3000 + 5 * LEAST_STEPS))
    assert run.told(report(1, 20 + LEAST_STEPS, 3000 + 5 * LEAST_STEPS))
    assert run.seconds() == pytest.approx(0.005)
    run.traces[1].end(OK, 2.0)
    assert not run.told(report(0, 200, 9000), report(1, 200, 9000))
    assert run.seconds() == pytest.approx(0.005)


def test_a_part_of_few_steps_has_none(run: Run) -> None:
    run.decode()
    run.told()
    run.told(*(report(rank, 20, 3000) for rank in range(2)))
    run.told(*(report(rank, 19 + LEAST_STEPS, 4000) for rank in range(2)))
    assert run.seconds() is None


def test_sequences_that_never_decode_all_have_none(run: Run) -> None:
    run.traces[0].arrivals.append((1.0, 1))
    for steps in (20, 200, 400):
        assert run.told(*(report(rank, steps, steps * 10) for rank in range(2)))
    assert run.seconds() is None


async def test_watching_ends_with_the_first_sequence(run: Run) -> None:
    watching = asyncio.create_task(run.window.watch())
    run.decode()
    await asyncio.sleep(0.05)
    run.told(*(report(rank, 20, 3000) for rank in range(2)))
    await asyncio.sleep(0.05)
    run.told(*(report(rank, 120, 4000) for rank in range(2)))
    await asyncio.sleep(0.05)
    run.traces[0].end(OK, 2.0)
    await asyncio.wait_for(watching, 5.0)
    assert run.seconds() == pytest.approx(0.01)
