"""Ranks on GPUs join and leave while streams run: none ends, every position is published once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from ep_server.client import AsyncClient
from ep_server.errors import EpServerError
from tests.support.models.answers import Answers
from tests.support.ranks.gpu_streams import NEW, check, config_of, requests
from tests.support.ranks.serving import Serving, serving

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(300),
]
Step = tuple[dict[str, Any], set[int]]  # what Scale is asked for, and the ranks that serve then


async def scaled(served: Serving, model: Answers, steps: list[Step]) -> None:
    """Each step while streams run, which check() compares with an undisturbed run."""
    undisturbed = await served.run(requests(model))
    async with AsyncClient(served.server.address) as client:
        for asked, live in steps:
            running = asyncio.ensure_future(served.run(requests(model)))
            await served.until(
                lambda: max((len(one.output) for one in served.server.engine._requests), default=0) > NEW // 4
            )
            done = await client.scale(**asked)
            assert set(done.live) == served.group.live == live
            assert {active.rank for active in served.server.engine._requests} <= live
            print(f"{asked}: steps paused {done.pause_seconds * 1000:.1f} ms")
            check(model, await running, undisturbed)
        most = served.group.num_ranks + 1
        with pytest.raises(EpServerError, match=rf"at most {torch.cuda.device_count()} \(parallel.max_ranks"):
            await client.scale(most)
    assert not served.heard.lost and not served.heard.recovered
    check(model, await served.run(requests(model)), undisturbed)


@pytest.mark.parametrize("overlap", ["off", "on"])
async def test_ranks_leave_and_return(answers: dict[str, Answers], overlap: str) -> None:
    """Two ranks become one and two again, held out and drained; the lower one leaves too."""
    model = answers["qwen3_moe"]
    steps: list[Step] = [
        ({"ranks": 1}, {0}),
        ({"ranks": 2}, {0, 1}),
        ({"hold_out": [0]}, {1}),
        ({}, {0, 1}),
    ]
    fields = {"parallel__overlap": overlap, "parallel__max_ranks": torch.cuda.device_count()}
    async with serving(config_of(model, **fields)) as served:
        await scaled(served, model, steps)


async def test_a_rank_grows_into_a_free_gpu(answers: dict[str, Answers]) -> None:
    """There may be more ranks than GPUs: what does not fit is refused, and names the GPUs."""
    model, gpus = answers["qwen3_moe"], torch.cuda.device_count()
    fields = {"parallel__ranks": 1, "parallel__max_ranks": gpus + 1}
    async with serving(config_of(model, **fields)) as served:
        await scaled(served, model, [({"ranks": 2}, {0, 1}), ({"ranks": 1, "hold_out": [0]}, {1})])


async def test_too_few_slots_are_refused(answers: dict[str, Answers]) -> None:
    """One of two ranks cannot hold all experts, and the error says how many must serve."""
    model = answers["qwen3_moe"]
    config = config_of(model, resilience__spare_slots="1")
    async with serving(config) as served, AsyncClient(served.server.address) as client:
        with pytest.raises(EpServerError, match="at least 2 must serve"):
            await client.scale(1)
        assert served.group.live == {0, 1}
