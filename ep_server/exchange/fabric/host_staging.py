"""Staging in pinned host memory, through which a FabricDeviceExchange copies rows.

To send, tensors are copied to the host. The send begins when all of them have arrived, as the inner exchange
takes them at once. Received rows are read in place, gathered once for each token (not for each expert) and
copied to the device in chunks; each copy runs while the next chunk is gathered.

The memory is allocated once, for the largest operation of the spec. Sends need it once: the host waits until
it is filled, and the inner exchange has read it when its send returns. Receives need it for every bank:
copies to the device may still read that of the last operation when the next one is received.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from ep_server.exchange.api import PendingCombine, PendingDispatch, Received, Reduction
from ep_server.exchange.fabric.copies import Arrival, Copies, Slot
from ep_server.exchange.host import HostExchange
from ep_server.exchange.row_order import as_bytes, places
from ep_server.exchange.shapes import Shapes

CHUNK_BYTES = 256 << 10  # gathered on the host while the last chunk travels to the device
Sent = TypeVar("Sent")
Tables = Callable[[Received, torch.Tensor], list[torch.Tensor]]  # as places()
ReceiveSums = Callable[[torch.Tensor | None], torch.Tensor]  # of a combine; gets `out`


@dataclass(frozen=True, slots=True)
class ExpertOutputs:
    """What a combine sends. rows: [N, H] by entry. inner: as the inner exchange received it. tokens: T."""

    rows: torch.Tensor
    inner: Received
    tokens: int
    weights: torch.Tensor | None
    reduction: Reduction


class Outgoing(Generic[Sent]):
    """A send whose tensors are on their way. arrived: waits for them, where send() is not called."""

    __slots__ = ("_send", "arrived")

    def __init__(self, arrived: Arrival, send: Callable[[], Sent]) -> None:
        self.arrived, self._send = arrived, send

    def send(self) -> Sent:
        """Waits for the tensors, which may be overwritten then, and sends."""
        self.arrived()
        return self._send()


@dataclass(frozen=True, slots=True)
class ReceivedRows:
    """A receive on the device. counts: [E_local] int32. tables: int64, of the Tables asked for.

    rows: [front + M, C] or longer, rows and scales, if any: the received ones after `front` unwritten rows.
    """

    counts: torch.Tensor
    tables: list[torch.Tensor]
    rows: list[torch.Tensor]


class RowStaging(Protocol):
    """A way of rows between the device and the network: HostStaging or GpuDirect."""

    def begin_dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None
    ) -> Outgoing[PendingDispatch]:
        """Begins the copies of a dispatch of checked tensors."""
        ...

    def begin_combine(self, outputs: ExpertOutputs) -> Outgoing[ReceiveSums]:
        """Begins the copies of a combine."""
        ...

    def copy_received(
        self, inner: Received, tables: Tables = places, *, front: int = 0, length: int = 0
    ) -> ReceivedRows:
        """Received rows and tables on the device, behind which the caller's stream continues.

        Args:
            inner: an INDEX view; its bank is given back. tables: at most 3 N + 2 E_local + 1 numbers.
            front: unwritten rows before the received ones. length: least rows in all.
        """
        ...

    def drain(self) -> None:
        """Returns once no copy and no kernel reads any of it."""
        ...

    @property
    def memory_bytes(self) -> int:
        """On the device."""
        ...

    @property
    def staging_bytes(self) -> int:
        """On the host; pinned where the device is a GPU."""
        ...


class RecvStaging:
    """Staging of one bank's receive: a row and its scales for each token of each rank, and its tables."""

    def __init__(self, shapes: Shapes, copies: Copies) -> None:
        self.slot, spec = Slot(), shapes.spec
        self._staged = [copies.staging((shapes.padded_rows, spec.hidden), shapes.row_dtype)]
        if shapes.fp8:
            self._staged.append(copies.staging((shapes.padded_rows, shapes.groups), shapes.scale_dtype))
        self._counts = copies.staging((shapes.num_local,), torch.int32)
        self._tables = copies.staging((3 * shapes.most_rows + 2 * shapes.num_local + 1,), torch.int64)

    def copy_received(
        self, inner: Received, copies: Copies, tables: Tables, front: int, length: int
    ) -> ReceivedRows:
        """Begins the copies; reads `inner`, an INDEX view, for the last time."""
        assert inner.row_ids is not None
        copies.reuse(self.slot)
        delivery = copies.delivery(self.slot)
        used, entry = torch.unique(inner.row_ids, return_inverse=True)
        numbers = tables(inner, entry)
        staged_tables = self._tables[: sum(map(len, numbers))]
        torch.cat(numbers, out=staged_tables)
        self._counts.copy_(inner.counts)
        there = delivery.empty(tuple(staged_tables.shape), torch.int64)
        counts = delivery.empty(tuple(self._counts.shape), torch.int32)
        delivery.copy(there, staged_tables)  # all tables in one copy
        delivery.copy(counts, self._counts)
        length = max(length, front + len(used))
        rows = [delivery.empty((length, staged.shape[1]), staged.dtype) for staged in self._staged]
        regions = [inner.rows] if inner.scales is None else [inner.rows, inner.scales]
        step = max(1, CHUNK_BYTES // (self._staged[0].shape[1] * self._staged[0].element_size()))
        for begin in range(0, len(used), step):
            end = min(begin + step, len(used))
            for region, staged, out in zip(regions, self._staged, rows, strict=True):
                torch.index_select(as_bytes(region), 0, used[begin:end], out=as_bytes(staged[begin:end]))
                delivery.copy(out[front + begin : front + end], staged[begin:end])
        delivery.finish()
        return ReceivedRows(counts, list(torch.split(there, [len(each) for each in numbers])), rows)

    def tensors(self) -> list[torch.Tensor]:
        """All that was allocated."""
        return [*self._staged, self._counts, self._tables]


class ResultStaging:
    """Staging of one bank's sums on their way back."""

    def __init__(self, shapes: Shapes, copies: Copies) -> None:
        self.slot = Slot()
        self.rows = copies.staging((shapes.spec.max_tokens, shapes.spec.hidden), shapes.combine_dtype)

    def copy_result(
        self, pending: PendingCombine, tokens: int, copies: Copies, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Receives the sums and begins their copy."""
        copies.reuse(self.slot)
        staged = pending.recv(self.rows[:tokens])
        delivery = copies.delivery(self.slot, into=out)
        if out is None:
            out = delivery.empty(tuple(staged.shape), staged.dtype)
        delivery.copy(out, staged)
        delivery.finish()
        return out


class HostStaging:
    """See RowStaging. inner: stays the caller's."""

    memory_bytes = 0

    def __init__(self, inner: HostExchange, copies: Copies) -> None:
        self._inner, self._copies, shapes, spec = inner, copies, inner.shapes, inner.spec
        self._x = copies.staging((spec.max_tokens, spec.hidden), shapes.combine_dtype)
        self._ids = copies.staging((spec.max_tokens, spec.top_k), torch.int64)
        self._weights = copies.staging((spec.max_tokens, spec.top_k), torch.float32)
        self._outputs = copies.staging((shapes.most_rows, spec.hidden), shapes.combine_dtype)
        self._recvs = [RecvStaging(shapes, copies) for _ in range(spec.num_banks)]
        self._results = [ResultStaging(shapes, copies) for _ in range(spec.num_banks)]
        self._received = self._returned = 0

    def begin_dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None
    ) -> Outgoing[PendingDispatch]:
        """As RowStaging says."""
        tokens, staged_weights = len(x), None
        staged_x, staged_ids = self._x[:tokens], self._ids[:tokens]
        pairs = [(staged_x, x), (staged_ids, ids)]
        if weights is not None:
            staged_weights = self._weights[:tokens]
            pairs.append((staged_weights, weights))
        return Outgoing(
            self._copies.fetch(*pairs),
            lambda: self._inner.dispatch_send(staged_x, staged_ids, staged_weights),
        )

    def begin_combine(self, outputs: ExpertOutputs) -> Outgoing[ReceiveSums]:
        """As RowStaging says."""
        staged, tokens, weights = self._outputs[: len(outputs.rows)], outputs.tokens, None
        pairs = [(staged, outputs.rows)]
        if outputs.weights is not None:
            weights = self._weights[:tokens]
            pairs.append((weights, outputs.weights))

        def send() -> ReceiveSums:
            pending = self._inner.combine_send(staged, outputs.inner, weights, reduction=outputs.reduction)
            return lambda out: self._next_result().copy_result(pending, tokens, self._copies, out)

        return Outgoing(self._copies.fetch(*pairs), send)

    def copy_received(
        self, inner: Received, tables: Tables = places, *, front: int = 0, length: int = 0
    ) -> ReceivedRows:
        """As RowStaging says."""
        self._received += 1
        staging = self._recvs[self._received % len(self._recvs)]
        rows = staging.copy_received(inner, self._copies, tables, front, length)
        self._inner.release(inner)
        return rows

    def drain(self) -> None:
        """As RowStaging says."""
        for slot in [each.slot for each in self._recvs] + [each.slot for each in self._results]:
            self._copies.reuse(slot)

    @property
    def staging_bytes(self) -> int:
        """As RowStaging says."""
        tensors = [self._x, self._ids, self._weights, self._outputs]
        tensors += [each.rows for each in self._results]
        tensors += [tensor for each in self._recvs for tensor in each.tensors()]
        return sum(tensor.nbytes for tensor in tensors)

    def _next_result(self) -> ResultStaging:
        self._returned += 1
        return self._results[self._returned % len(self._results)]
