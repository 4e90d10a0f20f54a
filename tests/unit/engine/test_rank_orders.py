"""Changes of the ranks take turns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ep_server.engine.rank_orders import RankOrders
from ep_server.errors import Unavailable, WrongState
from ep_server.testing.fake_ranks import FakeRanks


def made() -> RankOrders:
    ranks: Any = FakeRanks(2)
    return RankOrders(ranks)


async def test_a_change_waits_its_turn_but_not_for_ever() -> None:
    orders, ran = made(), asyncio.Event()

    async def change() -> float:
        assert orders.changing.locked()
        ran.set()
        return 0.5

    async with orders.changing:
        with pytest.raises(Unavailable, match=r"another change after 0\.01 s"):
            await orders.alone("Scale", change, 0.01)
        waiting = asyncio.ensure_future(orders.alone("Scale", change, 60.0))
        await asyncio.sleep(0.01)
        assert not ran.is_set()
        with pytest.raises(WrongState, match="another call of Scale runs"):
            await orders.alone("Scale", change)
    assert await asyncio.wait_for(waiting, 30) == 0.5
    assert await orders.alone("Scale", change) == 0.5
    assert not orders.changing.locked()


async def test_a_change_goes_on_without_its_caller() -> None:
    orders, go_on, ended = made(), asyncio.Event(), asyncio.Event()

    async def change() -> None:
        await go_on.wait()
        ended.set()

    for waits in (True, False):
        if waits:
            await orders.changing.acquire()
        calling = asyncio.ensure_future(orders.alone("Scale", change))
        await asyncio.sleep(0.01)
        calling.cancel()
        await asyncio.wait([calling])
        if waits:  # it had not begun
            orders.changing.release()
            assert not orders.changing.locked()
    assert orders.changing.locked()
    with pytest.raises(WrongState, match="another call of Scale runs"):
        await orders.alone("Scale", change)
    go_on.set()
    await asyncio.wait_for(ended.wait(), 30)
    await asyncio.wait_for(orders.alone("Scale", change), 30)
