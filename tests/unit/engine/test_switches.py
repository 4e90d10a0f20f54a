"""New weights and another placement whose switch some ranks do not report: no pause is known then."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ep_server.engine import balancer, weights
from ep_server.engine.balancer import Balancer
from ep_server.engine.observer import NullObserver
from ep_server.engine.rank_orders import RankOrders
from ep_server.engine.weights import Weights
from ep_server.errors import DeadlineExceeded, EpServerError, RankLost
from ep_server.orders import OrderDone, RankOrder, SwitchChange
from ep_server.scheduler.balance import Plan
from ep_server.scheduler.placement import Placement

LATE = r"ranks \[1\] did not answer within 0\.05 s"


class Ranks:
    """Two ranks that prepare what they are asked to. Rank 1 reports no switch; with `lost` it is lost."""

    num_ranks = 2

    def __init__(self, *, lost: bool = False) -> None:
        self.orders, self.lost = RankOrders(self), lost  # type: ignore[arg-type]
        self.group: Any = None

    def order(self, order: RankOrder, number: int) -> None:
        self.orders.on_done(0, OrderDone(number, nbytes=8, rate=1e9, seconds=0.002))
        if not isinstance(order, SwitchChange):
            self.orders.on_done(1, OrderDone(number, nbytes=8, rate=1e9))
        elif self.lost:
            asyncio.get_running_loop().call_soon(self.orders.end, RankLost("rank 1 was lost: killed"))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SWITCH_SECONDS", 0.05)
    monkeypatch.setattr(balancer, "SWITCH_SECONDS", 0.05)


@pytest.mark.parametrize(
    ("lost", "error", "text"), [(False, DeadlineExceeded, LATE), (True, RankLost, "rank 1 was lost: killed")]
)
async def test_new_weights_that_not_all_ranks_report_are_in_force(
    lost: bool, error: type[EpServerError], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    made = Weights(Ranks(lost=lost).orders, "old", lambda path, version, files: None, 1.0)
    with pytest.raises(error, match=text + "; weights 1 are in force"):
        await made.update("new", lambda path: "")
    assert (made.version, made.path, made.switching) == (1, "new", False)
    assert "weights 1 are in force" in caplog.text and "paused" not in caplog.text


@pytest.mark.parametrize(
    ("lost", "text"), [(False, "moving experts: ranks [1] did not answer"), (True, "rank 1 was lost")]
)
async def test_experts_that_not_all_ranks_report_have_moved(
    lost: bool, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = (Placement(2, 1, (experts,), ((1, 1),)) for experts in ((0, 1), (1, 0)))
    ranks, observer, moved = Ranks(lost=lost), NullObserver(), list[int]()
    ranks.group = SimpleNamespace(placement=before, live=(0, 1))
    observer.on_experts_moved = moved.append  # type: ignore[method-assign]
    caplog.set_level("INFO")
    made = Balancer(ranks, None, observer)
    assert made.placement == before
    await made._switch(before, Plan(after, ()), 1.5)
    assert made.placement == after and moved == [0]
    assert f"not all ranks have reported that they use them: {text}" in caplog.text
    assert "paused" not in caplog.text and "stay" not in caplog.text
