"""[7] How rows get from the tokens of a step to the experts and back: the Rows protocol and five versions.

    PlainRows   over any exchange: send at once, receive in the hook; the host takes part
    LocalRows   a rank without peers: rows stay where they are
    FusedRows   over NVLink: both halves of a transfer in one kernel, without the host, so it can be captured
    SideRows    FusedRows on a second stream, beside the other micro-batch
    ManyRows    over NVLink, for steps of many rows: kernels of their own, without the host too

A call starts a transfer and returns a hook; the layer loop calls the hook one yield later. Two micro-batches
share one exchange, so all ranks must start transfers in the same order, which the layer loop ensures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import torch

from ep_server.backends.gpu.kernels.triton.local_rows import ExpertOutputs, Places, place_rows
from ep_server.backends.gpu.side_stream import Hook, SideStream
from ep_server.errors import InternalError
from ep_server.exchange.api import AddNorm, Exchange, FusedExchange, Received, View

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tokens:
    """The rows of a dispatch. x: [T, H] of the wire's dtype. ids: [T, K] int64. gates: [T, K] float32."""

    x: torch.Tensor
    ids: torch.Tensor
    gates: torch.Tensor


@dataclass(frozen=True, slots=True)
class Arrival:
    """Arguments of a receive. most: the largest micro-batch on any rank, in rows.

    expert_tokens: [E_local] int32, += rows received.
    read_ahead: the experts' kernel reads weights before the rows arrive, if it is next on the stream.
    """

    most: int
    expert_tokens: torch.Tensor
    read_ahead: bool = False


@dataclass(frozen=True, slots=True)
class DeferredCombine:
    """A combine that starts when its sums are needed, in the same kernel as the work on these sums.

    out: of the experts, in the layout of received. shared: [T, H], output of shared experts, or None.
    """

    exchange: FusedExchange
    out: torch.Tensor
    received: Received
    shared: torch.Tensor | None = None

    def run(self, norm: AddNorm | None = None) -> torch.Tensor:
        """[T, H]: the sums without `shared`, or the result of `norm`. Call it once."""
        return self.exchange.combine(self.out, self.received, next_reads_ahead=True, add_norm=norm)


class Rows(Protocol):
    """The exchange of a device, as a sparse block uses it."""

    def dispatch(self, tokens: Tokens, arrival: Arrival) -> Hook[Received]:
        """Starts a dispatch."""
        ...

    def combine(
        self, out: torch.Tensor, received: Received
    ) -> Hook[torch.Tensor | ExpertOutputs | DeferredCombine]:
        """Starts a combine, or defers it to the kernel that adds its sums. out: in received's layout.

        Returns: a hook that returns [T, H], or the terms of that sum.
        """
        ...


class NoRows:
    """Where there is no such exchange."""

    def dispatch(self, tokens: Tokens, arrival: Arrival) -> Hook[Received]:
        """Raises InternalError."""
        raise InternalError("this rank has no exchange of many rows")

    def combine(self, out: torch.Tensor, received: Received) -> Hook[torch.Tensor]:
        """Raises InternalError."""
        raise InternalError("this rank has no exchange of many rows")


@dataclass(frozen=True, slots=True)
class RowsOfSteps:
    """How rows are sent in steps of one micro-batch, and of two; and in those that use the exchange of many
    rows.

    check: raises errors that kernels have found since. A replayed graph makes no call that could raise.
    """

    one: Rows
    two: Rows
    check: Callable[[], None] = lambda: None
    many: Rows = field(default_factory=NoRows)


class PlainRows:
    """Over any exchange: sends at once, receives in the hook; the host takes part. view: of received rows."""

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
    """For a rank without peers: rows stay where they are, unrounded. It can be captured.

    The kernel that adds to the residual stream computes their sum.
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

    def combine(self, out: torch.Tensor, received: Received) -> Hook[ExpertOutputs]:
        """See Rows."""
        assert isinstance(received.handle, tuple)
        tokens, places = received.handle
        return lambda: ExpertOutputs(out, tokens.ids, tokens.gates, places.rows)


class FusedRows:
    """Over NVLink, both halves in one kernel, at once. Nothing waits for the GPU: it can be captured.

    alone: the stream's next kernel computes, and may be set up while rows are in flight. A combine is then
      deferred to the kernel that adds its sums to the residual stream and norms them.
    """

    def __init__(self, exchange: FusedExchange, *, alone: bool = True) -> None:
        self._exchange, self._alone, spec = exchange, alone, exchange.spec
        self._choices = spec.num_ranks * min(spec.top_k, max(len(spec.local_experts), 1))

    def dispatch(self, tokens: Tokens, arrival: Arrival) -> Hook[Received]:
        """See Rows. Rows stay where they arrived until their combine."""
        received = self._exchange.dispatch(
            tokens.x,
            tokens.ids,
            tokens.gates,
            View.INDEX,
            capacity=arrival.most * self._choices,  # the maximum: the host need not know the real number
            expert_stats=arrival.expert_tokens,
            most_tokens=arrival.most,
            next_reads_ahead=arrival.read_ahead and self._alone,
        )
        return lambda: received

    def combine(self, out: torch.Tensor, received: Received) -> Hook[torch.Tensor | DeferredCombine]:
        """See Rows."""
        if self._alone:
            return lambda: DeferredCombine(self._exchange, out, received)
        combined = self._exchange.combine(out, received, next_reads_ahead=False)
        return lambda: combined


class ManyRows:
    """Over an exchange of many rows (Exchange.normal) that never waits for the host: it can be captured."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, spec = exchange, exchange.spec
        self._choices = spec.num_ranks * min(spec.top_k, max(len(spec.local_experts), 1))

    def dispatch(self, tokens: Tokens, arrival: Arrival) -> Hook[Received]:
        """See Rows. Rows stay where they arrived until the next dispatch."""
        sent = self._exchange.dispatch_send(tokens.x, tokens.ids, tokens.gates)
        received = sent.recv(
            View.INDEX,
            capacity=arrival.most * self._choices,
            expert_stats=arrival.expert_tokens,
            most_tokens=arrival.most,
        )
        return lambda: received

    def combine(self, out: torch.Tensor, received: Received) -> Hook[torch.Tensor]:
        """See Rows."""
        combined = self._exchange.combine_send(out, received).recv()
        return lambda: combined


class SideRows:
    """As FusedRows, on its own stream, concurrent with the other micro-batch's attention and experts.

    A transfer starts after all earlier work of the current stream, and the current stream waits for it in the
    hook.

    Args:
        num_sms: multiprocessors that transfers may fill; the others compute meanwhile.
    """

    def __init__(self, exchange: FusedExchange, num_sms: int) -> None:
        self._exchange, self._num_sms = exchange, num_sms
        self._inner = FusedRows(exchange, alone=False)  # the next of its stream is another transfer
        self._side = SideStream(exchange.device, priority=-1)  # the few blocks of a transfer go first

    def dispatch(self, tokens: Tokens, arrival: Arrival) -> Hook[Received]:
        """See Rows."""
        return self._beside(partial(self._inner.dispatch, tokens, arrival))

    def combine(self, out: torch.Tensor, received: Received) -> Hook[torch.Tensor | DeferredCombine]:
        """See Rows."""
        return self._beside(partial(self._inner.combine, out, received))

    def _beside(self, transfer: Callable[[], Hook[T]]) -> Hook[T]:
        arrive = self._side.fork().run(partial(self._bounded, transfer))

        def hook() -> T:
            result, await_delay = arrive()
            await_delay()  # on the side stream it would hold up the other micro-batch's rows
            return result

        return hook

    def _bounded(self, transfer: Callable[[], Hook[T]]) -> tuple[T, Callable[[], None]]:
        with self._exchange.bounded(self._num_sms) as await_delay:
            return transfer()(), await_delay
