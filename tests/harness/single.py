"""Exchanges of one rank, made in the test's own process."""

from __future__ import annotations

import os

from ep_server.ep.exchange import Exchange, ExchangeSpec
from ep_server.ep.native import NativeExchange
from ep_server.ep.reference import ReferenceExchange
from ep_server.ep.segment import create_segment


def make_single(spec: ExchangeSpec, implementation: str) -> Exchange:
    """implementation: "reference" or "native"."""
    if implementation == "reference":
        return ReferenceExchange(spec)
    fd = create_segment(spec)
    try:
        return NativeExchange(spec, fd=fd)
    finally:
        os.close(fd)
