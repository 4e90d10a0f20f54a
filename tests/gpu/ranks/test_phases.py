"""Phases by a GPU's own clock: of a graph, and of rank processes."""

from __future__ import annotations

import pytest
import torch

from ep_server.backends.gpu.clock import DeviceClock
from ep_server.models.timers import Phase
from tests.support.models.answers import Answers
from tests.support.ranks.gpu_engine import SIZES, drawn

pytestmark = pytest.mark.gpu
NANO = 1e-9


def test_a_graph_tells_its_phases_at_every_replay() -> None:
    """The longer phase takes longer, and both lie within the step."""
    clock, x = DeviceClock(torch.device("cuda"), 1), torch.randn(2048, 2048, device="cuda")

    def step() -> None:
        clock.begin()
        for phase, products in ((Phase.ROUTER, 1), (Phase.EXPERTS, 20)):
            for _ in range(products):
                x @ x
            clock.lap(phase)

    step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    for _ in range(5):
        graph.replay()
        clock.end(True)
    torch.cuda.synchronize()
    read = clock.read()
    sums = read.sums
    assert 0 < sums["step/router"] < sums["step/experts"]
    assert sums["step/router"] + sums["step/experts"] <= sums["step/device"] < 5 * 10**9
    assert read.counters == {"device_steps": 5, "decode_device_steps": 0, "timed_steps": 5}


async def test_ranks_tell_what_their_steps_are_made_of(answers: dict[str, Answers]) -> None:
    """No longer than the step itself, which is no longer than the steps' part of the wall clock."""
    fields = {"model__dtype": "bfloat16", "metrics__device_phases": 1}
    _, heard = await drawn(answers["qwen3_moe"], SIZES[-1], **fields)
    for told in heard.statistics.values():
        timed, steps = told.counters["timed_steps"], told.counters["device_steps"]
        assert 0 < timed <= steps == told.counters["run_steps"]
        phases = [told.sums[f"step/{phase.name.lower()}"] for phase in Phase]
        assert sum(told.histograms["step/device"]) == steps
        assert all(phases) and sum(phases) <= told.sums["step/device"] <= told.sums["step/total"]
