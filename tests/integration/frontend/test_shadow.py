"""Experts from the host shadow: after the start, those of the checkpoint are NaN.

The oracle is an undisturbed run.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ep_server.cli.demo.run import DEMO_MODEL
from ep_server.v1 import control_pb2
from tests.support.losing import Losing, losing, run_all, seen, shortened, undisturbed
from tests.support.models.perturbed import perturbed
from tests.support.models.poisoned import poison_experts

WAIT = 120.0
SOME = shortened(64)[:4]
SHADOW = {"resilience__shadow": "on", "model__updates": "/"}


async def lose(lost: Losing, rank: int, expected: list[object]) -> None:
    """Kills a rank while requests run, and waits for the one that takes its place."""
    before = len(lost.heard.recovered)
    running = await lost.begun(SOME, 20)
    lost.signal(rank)
    assert [seen(output) for output in await running] == expected
    await lost.recovered(before + 1)
    assert [seen(output) for output in await run_all(lost.client, SOME)] == expected


@pytest.mark.parametrize("spares", ["auto", pytest.param("0", marks=pytest.mark.slow)])
async def test_lost_experts_come_from_the_shadow(tmp_path: Path, spares: str) -> None:
    """With spare slots the others load them, then the new process; without, the new process alone."""
    path = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, path)
    async with losing(model__path=str(path), resilience__spare_slots=spares, **SHADOW) as lost:
        expected = await undisturbed(lost.client, SOME)
        assert poison_experts(path)
        await lose(lost, 1, expected)


async def test_new_weights_renew_the_shadow(tmp_path: Path) -> None:
    other = perturbed(DEMO_MODEL, tmp_path / "other", share=1.0)
    async with losing(**SHADOW) as lost:
        old = await undisturbed(lost.client, SOME)
        request = control_pb2.UpdateWeightsRequest(path=str(other))
        done = await lost.client.control.UpdateWeights(request, timeout=WAIT)
        assert done.version == 1 and done.bytes > 0
        assert poison_experts(other)
        expected = [seen(output) for output in await run_all(lost.client, SOME)]
        assert expected != old
        await lose(lost, 2, expected)
