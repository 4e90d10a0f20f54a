"""Staging in pinned host memory: what a FabricDeviceExchange copies rows through.

What is sent is copied to the host and sent from there. A send begins when all of its rows are on the host, as
the inner exchange takes them at once. What comes is received in place, gathered once for each token (not for
each expert) and copied to the device in chunks, each under way while the next is gathered.

Allocated once, as large as the spec allows any operation to be. What is sent needs it once: the host waits
until it is filled, and the inner exchange has read it when its send returns. What comes needs it for every
bank: copies to the device may still read the last operation's when the next one is received.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from ep_server.exchange.api import ExchangeSpec, Received, Reduction
from ep_server.exchange.fabric.copies import Arrival, Copies, Delivery, Slot
from ep_server.exchange.row_order import as_bytes, places
from ep_server.exchange.shm import PendingCombine, PendingDispatch, ShmExchange
from ep_server.exchange.views import Views

CHUNK_BYTES = 256 << 10  # gathered on the host while the last chunk travels to the device


Sent = TypeVar("Sent")
Wrapped = TypeVar("Wrapped")


@dataclass(frozen=True, slots=True)
class Answers:
    """What combine_send sends. rows: [N, H] by entry. inner: as the inner exchange received it. tokens: T."""

    rows: torch.Tensor
    inner: Received
    tokens: int
    weights: torch.Tensor | None
    reduction: Reduction | None


class Outgoing(Generic[Sent]):
    """A send whose tensors are on their way. arrived: waits for them, where send() is not called."""

    __slots__ = ("_send", "arrived")

    def __init__(self, arrived: Arrival, send: Callable[[], Sent]) -> None:
        self.arrived, self._send = arrived, send

    def send(self) -> Sent:
        """Waits for the tensors, which may be overwritten then, and sends."""
        self.arrived()
        return self._send()

    def then(self, wrap: Callable[[Sent], Wrapped]) -> Outgoing[Wrapped]:
        """The same send, whose result is wrapped."""
        return Outgoing(self.arrived, lambda: wrap(self._send()))


@dataclass(frozen=True, slots=True)
class Brought:
    """What a receive has on the device. counts: [E_local] int32. tables: int64, as asked for.

    made: [front + M, C] or longer, rows and scales, if any: what came, behind `front` rows left free.
    """

    counts: torch.Tensor
    tables: list[torch.Tensor]
    made: list[torch.Tensor]


Tables = Callable[[Received, torch.Tensor], list[torch.Tensor]]  # as places()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be made of a receive. front: rows before what came. length: least rows of all.

    tables: what travels with it, at most 3 N + 2 E_local + 1 numbers.
    """

    tables: Tables = places
    front: int = 0
    length: int = 0


class RecvStaging:
    """Staging of one bank's receive: a row and its scales for each token of each rank, and its tables."""

    def __init__(self, spec: ExchangeSpec, views: Views, copies: Copies, entries: int) -> None:
        self.slot = Slot()
        self._staged = [copies.staging((views.padded_rows, spec.hidden), views.row_dtype)]
        if views.fp8:
            self._staged.append(copies.staging((views.padded_rows, views.groups), views.scale_dtype))
        self._counts = copies.staging((views.num_local,), torch.int32)
        self._tables = copies.staging((3 * entries + 2 * views.num_local + 1,), torch.int64)

    def bring(self, inner: Received, delivery: Delivery, wanted: Wanted) -> Brought:
        """Begins the copies of what came; reads `inner`, an INDEX view, for the last time."""
        assert inner.row_ids is not None
        used, entry = torch.unique(inner.row_ids, return_inverse=True)
        counts, tables = self._deliver(inner.counts, wanted.tables(inner, entry), delivery)
        regions = [inner.rows] if inner.scales is None else [inner.rows, inner.scales]
        front, length = wanted.front, max(wanted.length, wanted.front + len(used))
        made = [delivery.empty((length, staged.shape[1]), staged.dtype) for staged in self._staged]
        step = max(1, CHUNK_BYTES // (self._staged[0].shape[1] * self._staged[0].element_size()))
        for begin in range(0, len(used), step):
            end = min(begin + step, len(used))
            for region, staged, out in zip(regions, self._staged, made, strict=True):
                torch.index_select(as_bytes(region), 0, used[begin:end], out=as_bytes(staged[begin:end]))
                delivery.copy(out[front + begin : front + end], staged[begin:end])
        return Brought(counts, tables, made)

    def _deliver(
        self, counts: torch.Tensor, tables: list[torch.Tensor], delivery: Delivery
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Tables travel in one copy, beside the counts."""
        values = torch.cat(tables)
        staged = self._tables[: len(values)]
        staged.copy_(values)
        self._counts.copy_(counts)
        there = delivery.empty(tuple(values.shape), torch.int64)
        counted = delivery.empty(tuple(self._counts.shape), torch.int32)
        delivery.copy(there, staged)
        delivery.copy(counted, self._counts)
        return counted, list(torch.split(there, [len(each) for each in tables]))

    def tensors(self) -> list[torch.Tensor]:
        """All that was allocated."""
        return [*self._staged, self._counts, self._tables]


class ResultStaging:
    """Staging of one bank's sums on their way back."""

    def __init__(self, spec: ExchangeSpec, views: Views, copies: Copies) -> None:
        self.slot = Slot()
        self.rows = copies.staging((spec.max_tokens, spec.hidden), views.combine_dtype)


class Buffers:
    """All of one exchange.

    x, ids, weights: of this rank's tokens. answers: of its experts. Landings and results take turns.
    """

    def __init__(self, spec: ExchangeSpec, views: Views, copies: Copies) -> None:
        choices = (spec.max_tokens, spec.top_k)
        entries = views.padded_rows * min(spec.top_k, views.num_local)
        self.x = copies.staging((spec.max_tokens, spec.hidden), views.combine_dtype)
        self.ids = copies.staging(choices, torch.int64)
        self.weights = copies.staging(choices, torch.float32)
        self.answers = copies.staging((entries, spec.hidden), views.combine_dtype)
        self._recvs = [RecvStaging(spec, views, copies, entries) for _ in range(spec.num_banks)]
        self._results = [ResultStaging(spec, views, copies) for _ in range(spec.num_banks)]
        self._received = self._returned = 0

    def recv_staging(self) -> RecvStaging:
        """The next one; reuse its slot first."""
        self._received += 1
        return self._recvs[self._received % len(self._recvs)]

    def result(self) -> ResultStaging:
        """The next one; reuse its slot first."""
        self._returned += 1
        return self._results[self._returned % len(self._results)]

    def drain(self, copies: Copies) -> None:
        """Returns once no copy reads any of it."""
        for slot in [each.slot for each in self._recvs] + [each.slot for each in self._results]:
            copies.reuse(slot)

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        tensors = [self.x, self.ids, self.weights, self.answers]
        for recv_staging in self._recvs:
            tensors += recv_staging.tensors()
        tensors += [result.rows for result in self._results]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class HostStaging:
    """See device.RowStaging. inner: on CPU tensors; stays the caller's."""

    memory_bytes = 0

    def __init__(self, inner: ShmExchange, copies: Copies) -> None:
        self._inner, self._copies = inner, copies
        self._buffers = Buffers(inner.spec, inner.views, copies)

    def begin_dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None
    ) -> Outgoing[PendingDispatch]:
        """As RowStaging says."""
        tokens, staged_weights = len(x), None
        staged_x, staged_ids = self._buffers.x[:tokens], self._buffers.ids[:tokens]
        pairs = [(staged_x, x), (staged_ids, ids)]
        if weights is not None:
            staged_weights = self._buffers.weights[:tokens]
            pairs.append((staged_weights, weights))
        return Outgoing(
            self._copies.fetch(*pairs),
            lambda: self._inner.dispatch_send(staged_x, staged_ids, staged_weights),
        )

    def begin_combine(self, answers: Answers) -> Outgoing[PendingCombine]:
        """As RowStaging says."""
        staged = self._buffers.answers[: len(answers.rows)]
        pairs, weights = [(staged, answers.rows)], None
        if answers.weights is not None:
            weights = self._buffers.weights[: answers.tokens]
            pairs.append((weights, answers.weights))
        return Outgoing(
            self._copies.fetch(*pairs),
            lambda: self._inner.combine_send(staged, answers.inner, weights, reduction=answers.reduction),
        )

    def bring(self, inner: Received, wanted: Wanted) -> Brought:
        """As RowStaging says; the caller's stream comes after all copies."""
        staging = self._buffers.recv_staging()
        self._copies.reuse(staging.slot)
        delivery = self._copies.delivery(staging.slot)
        brought = staging.bring(inner, delivery, wanted)
        delivery.finish()
        self._inner.release(inner)
        return brought

    def result(self, inner: PendingCombine, tokens: int, out: torch.Tensor | None) -> torch.Tensor:
        """As RowStaging says."""
        staging = self._buffers.result()
        self._copies.reuse(staging.slot)
        staged = inner.recv(staging.rows[:tokens])
        delivery = self._copies.delivery(staging.slot, into=out)
        if out is None:
            out = delivery.empty(tuple(staged.shape), staged.dtype)
        delivery.copy(out, staged)
        delivery.finish()
        return out

    def drain(self) -> None:
        """As RowStaging says."""
        self._buffers.drain(self._copies)

    @property
    def staging_bytes(self) -> int:
        """As RowStaging says; pinned where the device is a GPU."""
        return self._buffers.bytes
