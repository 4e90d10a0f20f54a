"""A rank that runs as on a GPU, a step ahead, outlives another one: no output changes."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ep_server.cli.demo.run import DEMO_MODEL
from ep_server.client import AsyncClient
from ep_server.config import Config
from ep_server.orders import PreparePlacement, SwitchChange
from ep_server.records import EMPTY
from ep_server.scheduler import Placement
from ep_server.v1 import control_pb2
from tests.support.models.perturbed import perturbed
from tests.support.models.poisoned import poison_experts
from tests.support.ranks.serving import WAIT, serving
from tests.support.raw_client import Output

INTERPRETED = "tests.support.ranks.interpreted_rank"
PROMPT = [1, 5, 3, 7]
NEW = 12
# Everything that the device keeps of a request, and that runs ahead of the host.
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.5, "seed": 1},
    {"temperature": 1.5, "seed": 2, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 2.0, "seed": 3, "presence_penalty": 0.7, "output_logprobs": True, "top_n": 2},
    {"temperature": 2.0, "seed": 6, "regex": "[0-9]{60}", "ignore_eos": False},
]


def requests() -> list[dict[str, Any]]:
    every = {"token_ids": PROMPT, "max_new_tokens": NEW, "ignore_eos": True}
    return [every | one for one in ASKED]


def seen(output: Output) -> tuple[Any, ...]:
    """A prompt's kernels round otherwise than those of single tokens: logits differ in the last places."""
    best = [[top.token_id for top in one.top] for one in output.logprobs]
    return output.token_ids, output.text, best, output.finished.reason


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_no_output_changes() -> None:
    async with serving(configured(), INTERPRETED) as served:
        expected = [seen(output) for output in await served.run(requests())]
        for rank in (1, 0):
            pids = served.group.pids
            outputs = await served.lose(rank, NEW // 2, requests())
            assert [seen(output) for output in outputs] == expected
            assert served.group.pids[1 - rank] == pids[1 - rank], "the other rank keeps its process"


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_no_output_changes_without_any_rank() -> None:
    async with serving(configured(), INTERPRETED) as served:
        expected, group = [seen(output) for output in await served.run(requests())], served.group
        running = await served.begun(requests(), NEW // 2)
        for process in list(group._board.processes.values()):
            process.signal(signal.SIGKILL)
        assert [seen(output) for output in await running] == expected
        assert served.group is group


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_ranks_leave_and_join() -> None:
    """Two become one and two again; then the lower one is held out, and returns."""
    steps: list[tuple[dict[str, Any], set[int]]] = [
        ({"ranks": 1}, {0}),
        ({"ranks": 2}, {0, 1}),
        ({"hold_out": [0]}, {1}),
        ({}, {0, 1}),
    ]
    async with serving(configured(), INTERPRETED) as served, AsyncClient(served.server.address) as client:
        expected = [seen(output) for output in await served.run(requests())]
        for asked, live in steps:
            running = await served.begun(requests(), NEW // 3)
            assert set((await client.scale(**asked)).live) == served.group.live == live
            assert [seen(output) for output in await running] == expected
        assert not served.heard.lost and not served.heard.recovered


def configured(**fields: object) -> Config:
    return Config.from_values(
        {
            "grpc.port": 0,
            "model.path": str(DEMO_MODEL),
            "model.dtype": "float32",
            "exchange.reduction": "source",
            "exchange.timeout_seconds": 60.0,
            "parallel.graphs": False,  # their capture needs the other ranks here
            "parallel.overlap": "off",
            "parallel.ranks": 2,
            "parallel.threads_per_rank": 1,
            "resilience.max_losses": 100,
            "resilience.rank_losses": 0,
            "scheduler.kv_blocks": 64,
            "scheduler.max_step_tokens": 16,
            "scheduler.max_running": 8,
        }
        | {name.replace("__", "."): value for name, value in fields.items()}
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shadow", ["off", "on"])
async def test_new_weights_are_those_of_a_new_server(shadow: str, tmp_path: Path) -> None:
    """In the middle of requests; those after it, and after a loss, are a new server's."""
    other = perturbed(DEMO_MODEL, tmp_path / "other", share=1.0)
    async with serving(configured(model__path=str(other)), INTERPRETED) as served:
        expected = [seen(output) for output in await served.run(requests())]
    async with serving(configured(resilience__shadow=shadow, model__updates="/"), INTERPRETED) as served:
        running = await served.begun(requests(), 3)
        request = control_pb2.UpdateWeightsRequest(path=str(other))
        assert (await served.client.control.UpdateWeights(request, timeout=WAIT)).version == 1
        assert [len(output.token_ids) for output in await running] == [NEW] * len(ASKED)
        assert [seen(output) for output in await served.run(requests())] == expected
        if shadow == "on":
            assert poison_experts(other)
        outputs = await served.lose(1, NEW // 2, requests())
        assert [seen(output) for output in outputs] == expected


def swapped(placement: Placement) -> Placement:
    """Every expert that has a spare copy is served by that."""
    serves = []
    for held, before in zip(placement.experts, placement.serves, strict=True):
        spare = {expert for expert, part in zip(held, before, strict=True) if expert != EMPTY and not part}
        pairs = zip(held, before, strict=True)
        serves.append(tuple(int(not part) if expert in spare else part for expert, part in pairs))
    return replace(placement, serves=tuple(serves))


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_routes_change_behind_the_step_in_flight() -> None:
    """And no output does."""
    async with serving(configured(), INTERPRETED) as served:
        expected = [seen(output) for output in await served.run(requests())]
        engine = served.server.engine
        orders, before = engine._delivery.orders, engine.balancer.placement
        assert before is not None
        copied = before.with_copies((0, 1))
        assert swapped(copied) != copied
        running = asyncio.ensure_future(served.run(requests()))
        for change, placement in enumerate((swapped(copied), copied), 1):
            least = change * NEW // 3
            await served.until(lambda: max((len(one.output) for one in engine._requests), default=0) >= least)  # noqa: B023
            await orders.give(PreparePlacement(change, placement), WAIT, "moving experts")
            done = await orders.give(SwitchChange(change), WAIT, "moving experts")
            assert [one.error for one in done] == ["", ""]
        assert [seen(output) for output in await running] == expected
        assert not served.heard.lost
