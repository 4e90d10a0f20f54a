"""[7] How rows travel between the tokens of a step and the experts.

Two ways with one face: any exchange of ep/exchange.py, and the one over NVLink, which can do both halves of
an operation in one kernel, is given room for all that can come instead of being asked how much did, shows
rows where they arrived and counts them itself: the host has no part in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ep_server.ep.exchange import Exchange, PendingCombine, PendingDispatch, Received, View

if TYPE_CHECKING:  # it needs a driver
    from ep_server.ep.cuda import CudaExchange


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a dispatch sends. x: [T, H] of the wire's dtype. ids: [T, K] int64. gates: [T, K] float32."""

    x: torch.Tensor
    ids: torch.Tensor
    gates: torch.Tensor


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a receive is told. most: rows that the step has at most on any rank.

    expert_tokens: [E_local] int32, += rows received.
    """

    most: int
    expert_tokens: torch.Tensor


class Rows(Protocol):
    """The exchange of a device, as a sparse block uses it. Order of calls as of exchange.Exchange."""

    @property
    def exchange(self) -> Exchange:
        """What carries them."""
        ...

    def send(self, tokens: Tokens) -> PendingDispatch:
        """First half of a dispatch."""
        ...

    def receive(self, sent: PendingDispatch, arrival: Arrival) -> Received:
        """Second half."""
        ...

    def dispatch(self, tokens: Tokens, arrival: Arrival) -> Received:
        """Both halves, where nothing is done between them."""
        ...

    def answer(self, out: torch.Tensor, received: Received) -> PendingCombine:
        """First half of a combine. out: in the layout of `received`."""
        ...

    def combine(self, out: torch.Tensor, received: Received) -> torch.Tensor:
        """Both halves: [T, H]."""
        ...

    def check(self) -> None:
        """Raises what a kernel has found since: a replayed graph makes no call that would."""
        ...


class PlainRows:
    """Over any exchange; the host takes part."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def send(self, tokens: Tokens) -> PendingDispatch:
        """See Rows."""
        return self.exchange.dispatch_send(tokens.x, tokens.ids, tokens.gates)

    def receive(self, sent: PendingDispatch, arrival: Arrival) -> Received:
        """See Rows."""
        received = sent.recv()
        arrival.expert_tokens.add_(received.counts)
        return received

    def dispatch(self, tokens: Tokens, arrival: Arrival) -> Received:
        """See Rows."""
        return self.receive(self.send(tokens), arrival)

    def answer(self, out: torch.Tensor, received: Received) -> PendingCombine:
        """See Rows."""
        return self.exchange.combine_send(out, received)

    def combine(self, out: torch.Tensor, received: Received) -> torch.Tensor:
        """See Rows."""
        return self.answer(out, received).recv()

    def check(self) -> None:
        """See Rows; here every call says it itself."""


class NvlinkRows:
    """Over a CudaExchange. Nothing waits for the GPU; all of it can be captured."""

    def __init__(self, exchange: CudaExchange) -> None:
        self.exchange = exchange
        spec = exchange.spec
        self._choices = spec.num_ranks * min(spec.top_k, max(len(spec.local_experts), 1))

    def send(self, tokens: Tokens) -> PendingDispatch:
        """See Rows."""
        return self.exchange.dispatch_send(tokens.x, tokens.ids, tokens.gates)

    def receive(self, sent: PendingDispatch, arrival: Arrival) -> Received:
        """See Rows. Rows stay where they arrived until they are answered."""
        return sent.recv(View.INDEX, **self._how(arrival))

    def dispatch(self, tokens: Tokens, arrival: Arrival) -> Received:
        """See Rows."""
        return self.exchange.dispatch(tokens.x, tokens.ids, tokens.gates, View.INDEX, **self._how(arrival))

    def answer(self, out: torch.Tensor, received: Received) -> PendingCombine:
        """See Rows."""
        return self.exchange.combine_send(out, received)

    def combine(self, out: torch.Tensor, received: Received) -> torch.Tensor:
        """See Rows."""
        return self.exchange.combine(out, received)

    def check(self) -> None:
        """See Rows."""
        self.exchange.check()

    def _how(self, arrival: Arrival) -> dict[str, Any]:
        # Room for all that can come: so no host is asked how much it is.
        return {"capacity": arrival.most * self._choices, "expert_stats": arrival.expert_tokens}
