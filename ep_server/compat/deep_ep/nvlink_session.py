"""A Buffer's session of CUDA tensors: the NVLink exchange on the streams that DeepEP's users expect.

Only masked() and reset() wait for the GPU, so every other call can be captured in a CUDA graph. Failures that
a kernel finds are raised by the next call.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ep_server.compat.deep_ep.events import EventHandle, EventOverlap, Streams, capturing, record_use
from ep_server.compat.deep_ep.session import (
    CombineBuffers,
    CombineCall,
    Completed,
    Completion,
    DispatchCall,
    Operation,
    Outputs,
    without_rows,
)
from ep_server.errors import InternalError, InvalidArgument
from ep_server.exchange.api import Received, Reduction, View
from ep_server.exchange.nvlink.exchange import NvlinkExchange
from ep_server.exchange.nvlink.requests import Handle, Wire
from ep_server.exchange.nvlink.shapes import handle_of


class NvlinkSession:
    """See BufferSession. Every rank sums its experts' outputs, whether dispatch or combine has the weights.

    Args:
        exchange: this rank's end. Its module exists only where nvcc was.
        streams: of its device, shared by all sessions of a Buffer.
    """

    def __init__(self, exchange: NvlinkExchange, streams: Streams) -> None:
        self.exchange, self.spec = exchange, exchange.spec
        self.device, self.pinned = exchange.device, False
        self._streams = streams
        self._buffers = CombineBuffers(exchange.spec, exchange.device)
        self._generation = 0
        self._masked: frozenset[int] = frozenset()

    @property
    def known_masked(self) -> frozenset[int]:
        """As of the last query. Only the device knows of deadlines that passed since."""
        return self._masked

    def masked(self) -> frozenset[int]:
        """See BufferSession. Waits for the current stream."""
        self._streams.synchronize()
        self._masked = self.exchange.masked
        return self._masked

    def mask(self, ranks: Iterable[int]) -> None:
        """See BufferSession."""
        self.exchange.mask(ranks)
        self._masked = self._masked.union(ranks)

    def reset(self, dead: frozenset[int]) -> None:
        """See BufferSession. Waits for the GPU."""
        self._generation += 1
        self.exchange.reset(dead)
        self._masked = dead

    def close(self) -> None:
        """See BufferSession. Waits for the GPU."""
        self.exchange.close()

    # -- dispatch -------------------------------------------------------------------------------------

    def dispatch(self, call: DispatchCall, completion: Completion) -> tuple[Operation, Outputs, Completed]:
        """See BufferSession."""
        self.pinned = self.pinned or capturing()
        if completion.hook:
            return self._dispatch_send(call)
        padded = self.exchange.empty_padded()
        received, event = self._streams.communicate(
            lambda: self.exchange.dispatch(
                call.x,
                call.ids,
                call.weights,
                View.PADDED,
                out=padded,
                source_map=True,
                expert_stats=call.expert_stats,
                wait_stats=call.wait_stats,
            ),
            asynchronous=completion.asynchronous,
        )
        operation, handle = self._operation(call), handle_of(received)
        src_info, layout_range = take_source_map(handle)
        outputs = Outputs(padded[0], padded[1], received.counts, src_info, layout_range)
        # Allocated on the communication stream, read on the caller's.
        current = torch.cuda.current_stream(self.device)
        record_use(current, outputs.counts, src_info, layout_range)
        operation.received = without_rows(received)
        used = (call.x, call.ids, call.weights, call.expert_stats, call.wait_stats, *padded)
        return operation, outputs, (self._event(event, used), None)

    def _dispatch_send(self, call: DispatchCall) -> tuple[Operation, Outputs, Completed]:
        stream = self._streams.current()
        pending = self.exchange.dispatch_send(call.x, call.ids, call.weights)
        operation = self._operation(call)
        outputs = Outputs.empty(self.exchange.empty_padded(), self.spec)

        def hook() -> None:
            self._check(operation)
            # A receive writes the source map to the tensors in the handle.
            pending.handle.src_info, pending.handle.layout_range = (
                outputs.src_info,
                outputs.layout_range,
            )
            try:
                with torch.cuda.stream(stream):
                    received = pending.recv(
                        View.PADDED,
                        out=(outputs.rows, outputs.scales),
                        counts=outputs.counts,
                        expert_stats=call.expert_stats,
                        wait_stats=call.wait_stats,
                    )
            finally:  # also if the hook was called before
                take_source_map(pending.handle)
            operation.received = without_rows(received)

        return operation, outputs, (EventOverlap(), hook)

    def _operation(self, call: DispatchCall) -> Operation:
        tokens, top_k = call.ids.shape
        number = self._buffers.next_dispatch()
        return Operation(self, tokens, top_k, call.weights is not None, number, self._generation)

    # -- combine --------------------------------------------------------------------------------------

    def combine(self, operation: Operation, call: CombineCall, completion: Completion) -> Completed:
        """See BufferSession. Does not read call.ids: the dispatch has them."""
        self._check(operation)
        self.pinned = self.pinned or capturing()
        if operation.combining:
            raise InvalidArgument("handle", "of a combine whose hook was not called", "of one at a time")
        received, wire = operation.received, Wire.LOG10 if call.log_format else Wire.BF16
        assert received is not None
        if completion.hook:
            return self._combine_send(operation, received, call, wire)
        _, event = self._streams.communicate(
            lambda: self.exchange.combine(
                call.expert_out,
                received,
                call.weights,
                out=call.out,
                reduction=Reduction.RANK,
                wire=wire,
                wait_stats=call.wait_stats,
            ),
            asynchronous=completion.asynchronous,
        )
        used = (call.expert_out, call.weights, call.out, call.wait_stats)
        return self._event(event, used), None

    def _combine_send(
        self, operation: Operation, received: Received, call: CombineCall, wire: Wire
    ) -> Completed:
        stream = self._streams.current()
        pending = self.exchange.combine_send(
            call.expert_out, received, call.weights, reduction=Reduction.RANK, wire=wire
        )
        operation.combining = True

        def hook() -> None:
            self._check(operation)
            with torch.cuda.stream(stream):
                pending.recv(call.out, wait_stats=call.wait_stats)
            operation.combining = False

        return EventOverlap(), hook

    def combine_buffer(self, operation: Operation) -> torch.Tensor:
        """See BufferSession."""
        return self._buffers.of(operation)

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
        record_use(self._streams.communication, *used)
        return EventOverlap(event, used)


def take_source_map(handle: Handle) -> tuple[torch.Tensor, torch.Tensor]:
    """Removes src_info and layout_range from the handle: an Operation must not hold its outputs."""
    info, ranges = handle.src_info, handle.layout_range
    if info is None or ranges is None:
        raise InternalError("a PADDED receive with source_map=True left no source map")
    handle.src_info = handle.layout_range = None
    return info, ranges
