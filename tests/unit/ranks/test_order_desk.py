"""Orders that a rank refuses, and those that fail."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from ep_server.orders import CountExperts, FlushCache
from ep_server.ranks.order_desk import OrderDesk


@pytest.mark.parametrize(("order", "traced"), [(CountExperts(), False), (FlushCache(), True)])
def test_only_an_unexpected_error_is_traced(
    caplog: pytest.LogCaptureFixture, order: Any, traced: bool
) -> None:
    parts: Any = SimpleNamespace(experts=None, scheduler=None, profiler=None, new_weights=None)
    with caplog.at_level(logging.WARNING):
        done = OrderDesk(parts).obey(order, 7)
    assert done is not None and done.number == 7 and done.error
    (record,) = caplog.records
    assert bool(record.exc_info) is traced and done.error in record.getMessage()
