"""Ranks join and leave while requests run. The oracle is an undisturbed run; no stream ends."""

from __future__ import annotations

import asyncio

import pytest

from ep_server.client import AsyncClient
from ep_server.errors import EpServerError
from tests.support.losing import ASKED, losing, run_all, seen


async def test_ranks_join_and_leave_while_requests_run() -> None:
    """Two ranks become four, one is held out, two of them leave, and the first returns."""
    fields = {"parallel__ranks": 2, "parallel__max_ranks": 4, "resilience__spare_slots": "2"}
    async with losing(**fields) as lost, AsyncClient(lost.server.address) as client:
        expected = [seen(output) for output in await run_all(lost.client, ASKED)]
        engine = lost.server.engine
        for steps in (
            [({"ranks": 4}, {0, 1, 2, 3}), ({"hold_out": [2]}, {0, 1, 3})],
            [({"ranks": 2}, {0, 1}), ({"ranks": 3, "hold_out": [0]}, {1, 2, 3})],
            [({"ranks": 4}, {0, 1, 2, 3})],
        ):
            running = asyncio.ensure_future(run_all(lost.client, ASKED))
            await lost.until(lambda: max((len(a.output) for a in engine._requests), default=0) >= 5)
            for asked, live in steps:
                done = await client.scale(**asked)
                assert set(done.live) == lost.group().live == live
                assert {active.rank for active in engine._requests} <= live
                info = await client.server_info()
                assert set(info.live_ranks) == live
                assert set(info.ranks_out) == set(asked.get("hold_out", []))
            assert [seen(output) for output in await running] == expected
        assert len(lost.heard.recovered) == 0
        with pytest.raises(EpServerError, match=r"parallel\.max_ranks"):
            await client.scale(5)
        with pytest.raises(EpServerError, match="too few expert slots"):
            await client.scale(1)
        assert lost.group().live == {0, 1, 2, 3}
        lost.signal(1)  # a loss after all that
        await lost.recovered(1)
        assert [seen(output) for output in await run_all(lost.client, ASKED)] == expected
