"""Exchanges of one rank, made in the test's own process."""

from __future__ import annotations

import os

from ep_server.exchange.api import Exchange, ExchangeSpec
from ep_server.exchange.host import open_shm
from ep_server.exchange.segment import create_segment
from ep_server.testing.reference_exchange import ReferenceExchange


def make_single(spec: ExchangeSpec, implementation: str) -> Exchange:
    """implementation: "reference" or "native"."""
    if implementation == "reference":
        return ReferenceExchange(spec)
    fd = create_segment(spec)
    try:
        return open_shm(spec, fd)
    finally:
        os.close(fd)
