"""A Buffer's session: one exchange of fixed sizes, as the Buffer uses it. Here also its form for CPU tensors.

Outputs are returned before they are filled. An Operation holds what the five values of a DeepEP handle do not
say. It must not hold its own outputs: it lives as long as the handle's src_info.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ep_server.compat.deep_ep.events import EventHandle, EventOverlap
from ep_server.errors import InvalidArgument
from ep_server.exchange.api import ExchangeSpec, Received, Reduction, View
from ep_server.exchange.shm import ShmExchange
from ep_server.exchange.validate import CPU

NUM_COMBINE_BUFFERS = 2  # two micro-batches, as in DeepEP
Hook = Callable[[], None]
Completed = tuple[EventOverlap, Hook | None]


@dataclass(frozen=True, slots=True)
class Completion:
    """How a call completes: with an event instead of a wait, or with a hook that runs its second half."""

    asynchronous: bool
    hook: bool


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
        ids: a copy of the ids, if combine compares them.
        received: None until the second half has run; without rows.
        combining: a combine of it waits for its hook.
    """

    session: BufferSession
    tokens: int
    top_k: int
    weighted: bool
    number: int
    generation: int = 0
    ids: torch.Tensor | None = None
    received: Received | None = None
    combining: bool = False


class BufferSession(Protocol):
    """One exchange as a Buffer uses it.

    Attributes:
        pinned: a CUDA graph uses the session, so it must stay.
        known_masked: ranks known to be masked without asking the device.
    """

    spec: ExchangeSpec
    device: torch.device
    pinned: bool

    @property
    def known_masked(self) -> frozenset[int]: ...  # noqa: D102

    def masked(self) -> frozenset[int]:
        """Ranks that this one neither writes to nor waits for, after all calls so far."""
        ...

    def mask(self, ranks: Iterable[int]) -> None:
        """Stops communicating with these ranks. Local."""
        ...

    def reset(self, dead: frozenset[int]) -> None:
        """Starts a new generation with only `dead` masked. Collective among the others."""
        ...

    def close(self) -> None:
        """Frees the memory; idempotent."""
        ...

    def dispatch(self, call: DispatchCall, completion: Completion) -> tuple[Operation, Outputs, Completed]:
        """Runs the first half, and the second too unless the call completes with a hook."""
        ...

    def combine(self, operation: Operation, call: CombineCall, completion: Completion) -> Completed:
        """The same for a combine into call.out."""
        ...

    def combine_buffer(self, operation: Operation) -> torch.Tensor:
        """[E_local, R * max_tokens, H] bfloat16, for the expert outputs of this dispatch."""
        ...


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


class ShmSession:
    """A session of CPU tensors. A call is done when it returns.

    The exchange's reduction is SOURCE, which has room for both reductions.
    """

    def __init__(self, exchange: ShmExchange) -> None:
        self.exchange, self.spec = exchange, exchange.spec
        self.device, self.pinned = CPU, False
        self._buffers = CombineBuffers(exchange.spec, CPU)
        self.mask, self.reset, self.close = exchange.mask, exchange.reset, exchange.close

    @property
    def known_masked(self) -> frozenset[int]:
        """All masked ranks: the mask is in host memory."""
        return self.exchange.masked

    def masked(self) -> frozenset[int]:
        """See BufferSession."""
        return self.exchange.masked

    def dispatch(self, call: DispatchCall, completion: Completion) -> tuple[Operation, Outputs, Completed]:
        """See BufferSession."""
        pending = self.exchange.dispatch_send(call.x, call.ids, call.weights)
        outputs = Outputs.empty(self.exchange.empty_padded(), self.spec)
        number = self._buffers.next_dispatch()
        tokens, top_k = call.ids.shape
        operation = Operation(self, tokens, top_k, call.weights is not None, number, ids=call.ids.clone())

        def hook() -> None:
            received = pending.recv(View.PADDED, out=(outputs.rows, outputs.scales))
            src_info, layout_range = self.exchange.source_map(received)
            outputs.counts.copy_(received.counts)
            outputs.src_info.copy_(src_info)
            outputs.layout_range.copy_(layout_range)
            operation.received = without_rows(received)
            _add(call.wait_stats, pending.wait_ns)
            _add(call.expert_stats, outputs.counts)

        return operation, outputs, _complete(hook, completion)

    def combine(self, operation: Operation, call: CombineCall, completion: Completion) -> Completed:
        """See BufferSession."""
        assert operation.received is not None and operation.ids is not None
        if call.log_format:
            raise InvalidArgument("use_logfmt", True, "False: this format exists on GPUs only")
        if not torch.equal(call.ids, operation.ids):
            raise InvalidArgument("topk_idx", tuple(call.ids.shape), "the ids that were dispatched")
        reduction = Reduction.RANK if operation.weighted else Reduction.SOURCE
        pending = self.exchange.combine_send(
            call.expert_out, operation.received, call.weights, reduction=reduction
        )

        def hook() -> None:
            pending.recv(call.out)
            _add(call.wait_stats, pending.wait_ns)

        return _complete(hook, completion)

    def combine_buffer(self, operation: Operation) -> torch.Tensor:
        """See BufferSession."""
        return self._buffers.of(operation)


def without_rows(received: Received) -> Received:
    """The part of it that a combine needs. The caller may free the rows."""
    return replace(received, rows=received.rows.new_empty(0), scales=None)


def _add(statistic: torch.Tensor | None, found: torch.Tensor) -> None:
    if statistic is not None:
        statistic.add_(found)


def _complete(hook: Hook, completion: Completion) -> Completed:
    if completion.hook:
        return EventOverlap(), hook
    hook()
    return EventOverlap(EventHandle() if completion.asynchronous else None), None
