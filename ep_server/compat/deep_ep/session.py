"""A Buffer's session: one exchange of fixed sizes, on the streams that DeepEP's users expect.

Outputs are returned before they are filled. An Operation holds what the five values of a DeepEP handle lack.
It
must not hold its own outputs: it lives as long as the handle's src_info. On GPUs only masked() and reset()
wait for the device, so every other call can be captured in a CUDA graph. The next call raises failures that a
kernel finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from ep_server.compat.deep_ep.events import EventHandle, EventOverlap, HostStreams, Streams
from ep_server.errors import InvalidArgument
from ep_server.exchange.api import (
    Exchange,
    ExchangeSpec,
    Received,
    RecvOptions,
    Reduction,
    View,
    Wire,
)
from ep_server.exchange.device_wait import longest_wait
from ep_server.exchange.validate import check_tensor

NUM_COMBINE_BUFFERS = 2  # two micro-batches, as in DeepEP
Hook = Callable[[], None]
Completed = tuple[EventOverlap, Hook | None]


@dataclass(frozen=True, slots=True)
class Completion:
    """How a call completes: with an event instead of a wait, or with a hook that runs its second half."""

    asynchronous: bool
    hook: bool

    @classmethod
    def checked(cls, asynchronous: bool, hook: bool) -> Completion:
        """Raises InvalidArgument for both."""
        if asynchronous and hook:
            raise InvalidArgument("async_finish, return_recv_hook", (True, True), "not both True")
        return cls(asynchronous, hook)


@dataclass(frozen=True, slots=True)
class DispatchCall:
    """Arguments of low_latency_dispatch. Statistics are added to; None = not wanted.

    x [T, H], ids [T, K], weights [T, K] or None, expert_stats [E_local] int32, wait_stats [R] int64 ns.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor | None
    expert_stats: torch.Tensor | None
    wait_stats: torch.Tensor | None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All of them."""
        return self.x, self.ids, self.weights, self.expert_stats, self.wait_stats


@dataclass(frozen=True, slots=True)
class CombineCall:
    """Arguments of low_latency_combine.

    expert_out [E_local, R * max_tokens, H], ids [T, K], weights [T, K] or None if dispatch had them,
    out [T, H], written; wait_stats [R] int64 ns, added to; log_format: rows return in 10 bits a channel.
    """

    expert_out: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor | None
    out: torch.Tensor
    wait_stats: torch.Tensor | None
    log_format: bool


@dataclass(frozen=True, slots=True)
class Outputs:
    """The tensors that low_latency_dispatch returns."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    src_info: torch.Tensor
    layout_range: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All of them."""
        return self.rows, self.scales, self.counts, self.src_info, self.layout_range

    @classmethod
    def empty(cls, padded: tuple[torch.Tensor, torch.Tensor | None], spec: ExchangeSpec) -> Outputs:
        """Outputs around rows and scales of a PADDED view; nothing is written yet."""
        rows, scales = padded
        local, capacity = rows.shape[:2]
        return cls(
            rows=rows,
            scales=scales,
            counts=rows.new_empty(local, dtype=torch.int32),
            src_info=rows.new_empty((local, capacity), dtype=torch.int32),
            layout_range=rows.new_empty((local, spec.num_ranks), dtype=torch.int64),
        )


@dataclass(slots=True)
class Operation:
    """A dispatch whose send half has run.

    Attributes:
        tokens, top_k: T and K as dispatched. weighted: weights went with it.
        number: counts the dispatches of the session. generation: of the session, at the dispatch.
        ids: a copy of the ids, on CPUs, where combine compares them.
        received: None until the second half has run; without rows.
    """

    session: BufferSession
    tokens: int
    top_k: int
    weighted: bool
    number: int
    generation: int
    ids: torch.Tensor | None
    received: Received | None = None


class CombineBuffers:
    """Fixed memory for the expert outputs of the last NUM_COMBINE_BUFFERS dispatches, allocated on demand."""

    def __init__(self, spec: ExchangeSpec, device: torch.device) -> None:
        self._shape = (len(spec.local_experts), spec.num_ranks * spec.max_tokens, spec.hidden)
        self._device = device
        self._buffers: list[torch.Tensor | None] = [None] * NUM_COMBINE_BUFFERS
        self._dispatches = 0

    def next_dispatch(self) -> int:
        """The number of the next dispatch."""
        self._dispatches += 1
        return self._dispatches

    def of(self, operation: Operation) -> torch.Tensor:
        """The buffer of a dispatch. InvalidArgument if a later dispatch has it now."""
        age = self._dispatches - operation.number
        if age >= NUM_COMBINE_BUFFERS:
            allowed = f"one of the last {NUM_COMBINE_BUFFERS} of these sizes"
            raise InvalidArgument("handle", f"of {age} dispatches ago", allowed)
        at = operation.number % NUM_COMBINE_BUFFERS
        buffer = self._buffers[at]
        if buffer is None:
            buffer = torch.empty(self._shape, dtype=torch.bfloat16, device=self._device)
            self._buffers[at] = buffer
        return buffer


class BufferSession:
    """One exchange as a Buffer uses it.

    On GPUs every rank sums its experts' outputs, whether dispatch or combine has the weights. On CPUs the
    spec's reduction is SOURCE, which has room for both.

    Args:
        exchange: this rank's end, which can lose ranks.
        streams: of its device, shared by all sessions of a Buffer.
    Attributes:
        pinned: a CUDA graph uses the session, so it must stay.
    """

    def __init__(self, exchange: Exchange, device: torch.device, streams: Streams | HostStreams) -> None:
        if exchange.membership is None:
            raise InvalidArgument("exchange", exchange, "one whose ranks can be masked")
        self.exchange, self.spec, self.device = exchange, exchange.spec, device
        self.pinned, self.close = False, exchange.close
        self._membership, self._streams = exchange.membership, streams
        self._buffers = CombineBuffers(exchange.spec, device)
        self._generation, self._masked = 0, frozenset[int]()

    # -- membership -----------------------------------------------------------------------------------

    @property
    def known_masked(self) -> frozenset[int]:
        """Ranks known to be masked without asking the device, which may know of later deadlines."""
        return self._membership.masked if self.exchange.fused is None else self._masked

    def masked(self) -> frozenset[int]:
        """Ranks that this one neither writes to nor waits for, after all calls so far.

        Raises: InternalError if the device does not end them.
        """
        self._streams.synchronize(longest_wait(self.spec))
        self._masked = self._membership.masked
        return self._masked

    def mask(self, ranks: Iterable[int]) -> None:
        """Stops communicating with these ranks. Local."""
        gone = frozenset(ranks)
        self._membership.mask(gone)
        self._masked |= gone

    def reset(self, dead: frozenset[int]) -> None:
        """Starts a new generation with only `dead` masked. Collective among the others."""
        self._generation += 1
        self._membership.reset(dead)
        self._masked = dead

    # -- operations -----------------------------------------------------------------------------------

    def dispatch(self, call: DispatchCall, completion: Completion) -> tuple[Operation, Outputs, Completed]:
        """Runs the first half, and the second too unless the call completes with a hook."""
        self.pinned = self.pinned or self._streams.capturing()
        outputs = Outputs.empty(self.exchange.empty_padded(), self.spec)
        options: RecvOptions = {
            "out": (outputs.rows, outputs.scales),
            "counts": outputs.counts,
            "source_map": (outputs.src_info, outputs.layout_range),
            "expert_stats": call.expert_stats,
            "wait_stats": call.wait_stats,
        }
        if completion.hook:
            return self._dispatch_send(call, outputs, options)
        given, fused = (call.x, call.ids, call.weights), self.exchange.fused

        def work() -> Received:
            if fused is not None:
                return fused.dispatch(*given, View.PADDED, **options)
            return self.exchange.dispatch_send(*given).recv(View.PADDED, **options)

        received, event = self._streams.communicate(work, asynchronous=completion.asynchronous)
        operation = self._operation(call)
        operation.received = without_rows(received)
        return operation, outputs, (self._event(event, call.tensors + outputs.tensors), None)

    def _dispatch_send(
        self, call: DispatchCall, outputs: Outputs, options: RecvOptions
    ) -> tuple[Operation, Outputs, Completed]:
        resumed = self._streams.resumed()
        pending = self.exchange.dispatch_send(call.x, call.ids, call.weights)
        operation = self._operation(call)

        def hook() -> None:
            self._check(operation)
            with resumed():
                operation.received = without_rows(pending.recv(View.PADDED, **options))

        return operation, outputs, (EventOverlap(), hook)

    def _operation(self, call: DispatchCall) -> Operation:
        tokens, top_k = call.ids.shape
        number, ids = self._buffers.next_dispatch(), call.ids.clone() if self.exchange.fused is None else None
        return Operation(self, tokens, top_k, call.weights is not None, number, self._generation, ids)

    def combine(self, operation: Operation, call: CombineCall, completion: Completion) -> Completed:
        """The same for a combine into call.out. On GPUs call.ids are not read: the dispatch has them."""
        self._check(operation)
        self.pinned = self.pinned or self._streams.capturing()
        wire = Wire.LOG10 if call.log_format else Wire.BF16
        if wire not in self.exchange.capabilities.wires:
            raise InvalidArgument("use_logfmt", True, "False: this format exists on GPUs only")
        if operation.ids is not None and not torch.equal(call.ids, operation.ids):
            raise InvalidArgument("topk_idx", tuple(call.ids.shape), "the ids that were dispatched")
        received, reduction, fused = operation.received, self.spec.reduction, self.exchange.fused
        assert received is not None
        if operation.weighted:
            reduction = Reduction.RANK
        given, stats = (call.expert_out, received, call.weights), call.wait_stats
        if completion.hook:
            resumed = self._streams.resumed()
            pending = self.exchange.combine_send(*given, reduction=reduction, wire=wire)

            def hook() -> None:
                self._check(operation)
                with resumed():
                    pending.recv(call.out, wait_stats=stats)

            return EventOverlap(), hook

        def work() -> torch.Tensor:
            if fused is not None:
                return fused.combine(*given, out=call.out, reduction=reduction, wire=wire, wait_stats=stats)
            sent = self.exchange.combine_send(*given, reduction=reduction, wire=wire)
            return sent.recv(call.out, wait_stats=stats)

        _, event = self._streams.communicate(work, asynchronous=completion.asynchronous)
        return self._event(event, (call.expert_out, call.weights, call.out, stats)), None

    def combine_buffer(self, operation: Operation) -> torch.Tensor:
        """[E_local, R * max_tokens, H] bfloat16, for the expert outputs of this dispatch."""
        return self._buffers.of(operation)

    def own_row(self, name: str, stats: torch.Tensor | None) -> torch.Tensor | None:
        """The part of a wait statistic that this rank adds to: a [R] tensor, or its own row of [R, R]."""
        ranks = self.spec.num_ranks
        if isinstance(stats, torch.Tensor) and stats.dim() == 2:
            check_tensor(name, stats, self.device, torch.int64, R=ranks, sources=ranks)
            return stats[self.spec.rank]
        if stats is not None:
            check_tensor(name, stats, self.device, torch.int64, R=ranks)
        return stats

    # -- inside ---------------------------------------------------------------------------------------

    def _check(self, operation: Operation) -> None:
        """Raises what kernels have found. InvalidArgument for an operation of an older generation."""
        if operation.generation != self._generation:
            raise InvalidArgument("handle", "of an earlier generation", "of now: reset() dropped it")
        self.exchange.check()

    def _event(self, event: EventHandle | None, used: tuple[torch.Tensor | None, ...]) -> EventOverlap:
        """The event of a call without a hook. Keeps the tensors that an asynchronous call still uses."""
        if event is None:
            return EventOverlap()  # the current stream waits, so memory freed on it is reused later
        self._streams.record_use(*used)
        return EventOverlap(event, used)


def without_rows(received: Received) -> Received:
    """The part of it that a combine needs. The caller may free the rows."""
    return replace(received, rows=received.rows.new_empty(0), scales=None)
