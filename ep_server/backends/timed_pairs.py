"""Times a dispatch and its combine in both ways that steps may run them, for exchange.mode = auto."""

from __future__ import annotations

import time

import torch

from ep_server.exchange.api import Exchange
from ep_server.models.moe import wire_dtype


def live_ranks(exchange: Exchange) -> frozenset[int]:
    """Ranks that take part."""
    membership = exchange.membership
    return frozenset(range(exchange.spec.num_ranks)) if membership is None else membership.live


def drawn_ids(exchange: Exchange, device: torch.device) -> torch.Tensor:
    """[max_tokens, K] int64: of each token as many slots of live ranks, each set equally likely."""
    spec, live = exchange.spec, live_ranks(exchange)
    slots = torch.tensor([slot for slot, rank in enumerate(spec.placement) if rank in live], device=device)
    generator = torch.Generator(device).manual_seed(spec.rank)
    keys = torch.rand(spec.max_tokens, len(slots), generator=generator, device=device)
    return slots[keys.topk(spec.top_k, dim=1).indices]


class TimedPairs:
    """On CPU tensors, with experts drawn uniformly that return their rows."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, spec, device = exchange, exchange.spec, torch.device("cpu")
        self._ids = drawn_ids(exchange, device)
        self._weights = torch.ones(self._ids.shape, dtype=torch.float32, device=device)
        self._x = torch.zeros(spec.max_tokens, spec.hidden, dtype=wire_dtype(spec.payload), device=device)

    def run(self, normal: bool, tokens: int) -> int:
        """One pair with so many tokens on every rank, ns. normal: with the exchange of many rows.

        Collective. Raises: ExchangeError if a peer fails.
        """
        exchange = self._exchange.normal if normal else self._exchange
        assert exchange is not None
        exchange.barrier()  # ranks begin together
        began = time.perf_counter_ns()
        sent = exchange.dispatch_send(self._x[:tokens], self._ids[:tokens], self._weights[:tokens])
        received = sent.recv()
        rows = received.rows
        outputs = rows if rows.dtype == self._x.dtype else torch.zeros_like(rows, dtype=self._x.dtype)
        exchange.combine_send(outputs, received).recv()
        return time.perf_counter_ns() - began
