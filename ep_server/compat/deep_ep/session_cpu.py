"""The arena of CPU tensors: a Buffer's calls over ShmExchange. A call has finished when it returns."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ep_server.compat.deep_ep.events import EventHandle, EventOverlap
from ep_server.compat.deep_ep.operation import (
    CombineBuffers,
    CombineCall,
    DispatchCall,
    Ended,
    Ending,
    Hook,
    Operation,
    Outputs,
    empty_outputs,
    without_rows,
)
from ep_server.errors import InvalidArgument
from ep_server.exchange.api import Reduction, View
from ep_server.exchange.shm import ShmExchange
from ep_server.exchange.tensors import CPU


class NativeArena:
    """See operation.Arena. The exchange's reduction is SOURCE, which has room for both."""

    def __init__(self, exchange: ShmExchange) -> None:
        self.exchange, self.spec = exchange, exchange.spec
        self.device, self.pinned = CPU, False
        self._buffers = CombineBuffers(exchange.spec, CPU)

    @property
    def known_masked(self) -> frozenset[int]:
        """All of them: the words lie in host memory."""
        return self.exchange.masked

    def masked(self) -> frozenset[int]:
        """See operation.Arena."""
        return self.exchange.masked

    def mask(self, ranks: Iterable[int]) -> None:
        """See operation.Arena."""
        self.exchange.mask(ranks)

    def reset(self, dead: frozenset[int]) -> None:
        """See operation.Arena."""
        self.exchange.reset(dead)

    def close(self) -> None:
        """See operation.Arena."""
        self.exchange.close()

    def dispatch(self, call: DispatchCall, ending: Ending) -> tuple[Operation, Outputs, Ended]:
        """See operation.Arena."""
        pending = self.exchange.dispatch_send(call.x, call.ids, call.weights)
        outputs = empty_outputs(self.exchange.empty_padded(), self.spec)
        turn = self._buffers.next_turn()
        tokens, top_k = call.ids.shape
        operation = Operation(self, tokens, top_k, call.weights is not None, turn, ids=call.ids.clone())

        def hook() -> None:
            received = pending.recv(View.PADDED, out=(outputs.rows, outputs.scales))
            src_info, layout_range = self.exchange.source_map(received)
            outputs.counts.copy_(received.counts)
            outputs.src_info.copy_(src_info)
            outputs.layout_range.copy_(layout_range)
            operation.received = without_rows(received)
            _add(call.wait_stats, pending.wait_ns)
            _add(call.expert_stats, outputs.counts)

        return operation, outputs, _end(hook, ending)

    def combine(self, operation: Operation, call: CombineCall, ending: Ending) -> Ended:
        """See operation.Arena."""
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

        return _end(hook, ending)

    def combine_buffer(self, operation: Operation) -> torch.Tensor:
        """See operation.Arena."""
        return self._buffers.of(operation.turn)


def _add(statistic: torch.Tensor | None, found: torch.Tensor) -> None:
    if statistic is not None:
        statistic.add_(found)


def _end(hook: Hook, ending: Ending) -> Ended:
    if ending.hook:
        return EventOverlap(), hook
    hook()
    return EventOverlap(EventHandle() if ending.asynchronous else None), None
