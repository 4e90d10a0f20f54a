"""[7] How rows travel between the tokens of a step and the experts.

A transfer is started, and its hook is called one yield later. Two micro-batches share one exchange, so all
ranks must start transfers in the same order: the layer loop does. Three ways with one face: any exchange of
ep/exchange.py; the one over NVLink, which can do both halves of an operation in one kernel, is given room for
all that can come instead of being asked how much did, shows rows where they arrived and counts them itself,
so that the host has no part in it; and the same on a stream of its own. A rank alone needs none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch

from ep_server.ep.exchange import AddNorm, Exchange, ExchangeSpec, Received, View
from ep_server.model.triton.local_rows import Answers, Places, place_rows

T = TypeVar("T")
Hook = Callable[[], T]  # called once, on the stream that the transfer was started on


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a dispatch sends. x: [T, H] of the wire's dtype. ids: [T, K] int64. gates: [T, K] float32."""

    x: torch.Tensor
    ids: torch.Tensor
    gates: torch.Tensor


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a receive is told. most: rows that the micro-batch has at most on any rank.

    expert_tokens: [E_local] int32, += rows received.
    read_ahead: the experts' kernel reads weights before the rows are there, if it is the stream's next.
    """

    most: int
    expert_tokens: torch.Tensor
    read_ahead: bool = False


class BothHalves(Protocol):
    """What is needed of ep.cuda.CudaExchange, which says more of it."""

    spec: ExchangeSpec
    device: torch.device

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        view: View,
        *,
        capacity: int,
        expert_stats: torch.Tensor,
        most_tokens: int,
        next_reads_ahead: bool,
    ) -> Received:
        """Both halves in one kernel."""
        ...

    def combine(
        self,
        expert_out: torch.Tensor,
        received: Received,
        *,
        next_reads_ahead: bool,
        add_norm: AddNorm | None = None,
    ) -> torch.Tensor:
        """Both halves in one kernel."""
        ...

    def can_norm(self, norm: AddNorm) -> bool:
        """Whether combine takes this add_norm."""
        ...

    def bounded(self, num_sms: int) -> AbstractContextManager[None]:
        """What is enqueued inside fills at most so many multiprocessors."""
        ...


@dataclass(frozen=True, slots=True)
class Unsent:
    """A combine that begins where its sums are needed, with what is made of them in the same kernel.

    out: of the experts, in the layout of received. shared: [T, H], what experts of all tokens add, or None.
    """

    exchange: BothHalves
    out: torch.Tensor
    received: Received
    shared: torch.Tensor | None = None

    def run(self, norm: AddNorm | None = None) -> torch.Tensor:
        """[T, H]: the sums, without `shared`; with `norm` what that says. Once."""
        return self.exchange.combine(self.out, self.received, next_reads_ahead=True, add_norm=norm)


class Rows(Protocol):
    """The exchange of a device, as a sparse block uses it."""

    def dispatch(self, tokens: Tokens, arrival: Arrival) -> Hook[Received]:
        """Starts a dispatch."""
        ...

    def combine(self, out: torch.Tensor, received: Received) -> Hook[torch.Tensor | Answers | Unsent]:
        """Starts a combine, or lets who adds its sums do so. out: in received's layout.

        Returns: a hook that returns [T, H], or what that is the sum of.
        """
        ...


@dataclass(frozen=True, slots=True)
class RowsOfSteps:
    """How rows travel in steps of one micro-batch, and of two.

    check: raises what a kernel has found since: a replayed graph makes no call that would.
    """

    one: Rows
    two: Rows
    check: Callable[[], None] = lambda: None


class PlainRows:
    """Over any exchange: sends at once, receives in the hook; the host takes part. view: of what comes."""

    def __init__(self, exchange: Exchange, view: View = View.COMPACT) -> None:
        self._exchange, self._view = exchange, view

    def dispatch(self, tokens: Tokens, arrival: Arrival) -> Hook[Received]:
        """See Rows."""
        sent = self._exchange.dispatch_send(tokens.x, tokens.ids, tokens.gates)

        def hook() -> Received:
            received = sent.recv(self._view)
            arrival.expert_tokens.add_(received.counts)
            return received

        return hook

    def combine(self, out: torch.Tensor, received: Received) -> Hook[torch.Tensor]:
        """See Rows."""
        return self._exchange.combine_send(out, received).recv


class LocalRows:
    """Of a rank without peers: rows stay where they are, unrounded. It can be captured.

    Their sum is left to what adds it to the residual stream.
    """

    def dispatch(self, tokens: Tokens, arrival: Arrival) -> Hook[Received]:
        """See Rows."""
        places = Places.empty(tokens.ids, len(arrival.expert_tokens))
        place_rows(tokens.ids, places, arrival.expert_tokens)
        handle = (tokens, places)
        received = Received(
            tokens.x, places.counts, places.offsets, handle, View.INDEX, row_ids=places.tokens
        )
        return lambda: received

    def combine(self, out: torch.Tensor, received: Received) -> Hook[Answers]:
        """See Rows."""
        assert isinstance(received.handle, tuple)
        tokens, places = received.handle
        return lambda: Answers(out, tokens.ids, tokens.gates, places.rows)


class FusedRows:
    """Over NVLink, both halves in one kernel, at once. Nothing waits for the GPU: it can be captured.

    alone: the stream's next kernel computes, and may be set up while rows are under way.
    norms: combine adds its sums to the residual stream and norms that; only alone.
    """

    def __init__(self, exchange: BothHalves, *, alone: bool = True, norms: bool = True) -> None:
        self._exchange, self._alone, spec = exchange, alone, exchange.spec
        self._norms = alone and norms
        self._choices = spec.num_ranks * min(spec.top_k, max(len(spec.local_experts), 1))

    def dispatch(self, tokens: Tokens, arrival: Arrival) -> Hook[Received]:
        """See Rows. Rows stay where they arrived until they are answered."""
        received = self._exchange.dispatch(
            tokens.x,
            tokens.ids,
            tokens.gates,
            View.INDEX,
            capacity=arrival.most * self._choices,  # all that can come: so no host is asked how much it is
            expert_stats=arrival.expert_tokens,
            most_tokens=arrival.most,
            next_reads_ahead=arrival.read_ahead,
        )
        return lambda: received

    def combine(self, out: torch.Tensor, received: Received) -> Hook[torch.Tensor | Unsent]:
        """See Rows."""
        if self._norms:
            return lambda: Unsent(self._exchange, out, received)
        combined = self._exchange.combine(out, received, next_reads_ahead=self._alone)
        return lambda: combined


class RowsBeside:
    """As FusedRows, on a stream of its own, beside the other micro-batch's attention and experts.

    A transfer begins behind all that the current stream was given before, and the current stream waits for it
    in the hook. So memory that one stream frees is never written by the other too early: what a transfer
    allocates is reused by a later one, which is behind all readers; what it reads lives until its hook.

    Args:
        num_sms: multiprocessors that transfers may fill; the others compute meanwhile.
    """

    def __init__(self, exchange: BothHalves, num_sms: int) -> None:
        self._exchange, self._num_sms = exchange, num_sms
        self._inner = FusedRows(exchange, alone=False)
        # Of high priority: the few blocks of a transfer go first.
        self._stream = torch.cuda.Stream(exchange.device, priority=-1)  # type: ignore[no-untyped-call]

    def dispatch(self, tokens: Tokens, arrival: Arrival) -> Hook[Received]:
        """See Rows."""
        arrival = replace(arrival, read_ahead=False)  # the next of this stream is another transfer
        return self._start(partial(self._inner.dispatch, tokens, arrival))

    def combine(self, out: torch.Tensor, received: Received) -> Hook[torch.Tensor | Unsent]:
        """See Rows."""
        return self._start(partial(self._inner.combine, out, received))

    def _start(self, transfer: Callable[[], Hook[T]]) -> Hook[T]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), self._exchange.bounded(self._num_sms):
            result = transfer()()
        ended = self._stream.record_event()

        def hook(read: object = transfer) -> T:  # `read` holds what the transfer reads
            torch.cuda.current_stream().wait_event(ended)
            return result

        return hook
