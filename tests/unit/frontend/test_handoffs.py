"""A prefill server says at its start that nobody can fetch from it."""

from __future__ import annotations

from typing import Any

import pytest

from ep_server.config import Config
from ep_server.frontend.handoffs import unreachable

PUBLIC = {"grpc.host": "0.0.0.0", "handoff.role": "prefill"}


@pytest.mark.parametrize(
    ("values", "warns"),
    [
        (PUBLIC, True),
        ({**PUBLIC, "handoff.role": "both", "handoff.host": "localhost"}, True),
        ({**PUBLIC, "handoff.host": "::1", "grpc.host": "::"}, True),
        ({**PUBLIC, "handoff.host": "10.0.0.5"}, False),
        ({**PUBLIC, "handoff.role": "decode"}, False),
        ({"handoff.role": "prefill"}, False),
    ],
)
def test_an_address_that_others_cannot_reach_is_named(values: dict[str, Any], warns: bool) -> None:
    config = Config.from_values({"model.path": "/models/m", **values})
    assert unreachable(config).startswith(f"handoff.host = {config.handoff.host}: only decode") is warns
