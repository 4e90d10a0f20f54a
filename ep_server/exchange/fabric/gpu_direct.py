"""GPU direct: staging in which the NIC reads and writes rows in the memory of the device.

What a send needs of the device is enqueued on the caller's stream: rows to where they are sent from, sums of
the experts' answers. The host waits for it, then sends; routing and headers are on the host, as ever. What
came is gathered where it arrived. A bank that the device still has to read goes back to the senders with this
rank's next send, after a wait for that reading. Arithmetic is that of the CPU, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ep_server.errors import InvalidArgument
from ep_server.exchange.api import ExchangeSpec, Received, Reduction
from ep_server.exchange.fabric.copies import Arrival, Copies, Slot, visible_on
from ep_server.exchange.fabric.device_rows import DeviceRows
from ep_server.exchange.fabric.exchange import FabricExchange
from ep_server.exchange.fabric.host_staging import Answers, Brought, Outgoing, Wanted
from ep_server.exchange.fabric.settings import FabricOptions
from ep_server.exchange.geometry import REDUCTIONS
from ep_server.exchange.row_order import as_bytes, ordered_sum
from ep_server.exchange.shm import PendingCombine as InnerCombine
from ep_server.exchange.shm import PendingDispatch as InnerDispatch
from ep_server.exchange.views import Views
from ep_server.exchange.waiting import Waiting

TURNS = 4  # uploads on their way at once


class Staging:
    """ids, weights: of this rank's tokens on their way to the host. upload(): tables on their way back."""

    def __init__(self, spec: ExchangeSpec, views: Views, copies: Copies) -> None:
        choices, rows = (spec.max_tokens, spec.top_k), views.padded_rows
        entries = rows * min(spec.top_k, views.num_local)
        self.ids = copies.staging(choices, torch.int64)
        self.weights = copies.staging(choices, torch.float32)
        numbers = max(
            3 * entries + 3 * views.num_local + 1 + rows, 2 * entries + rows, choices[0] * choices[1]
        )
        factors = max(entries, rows, choices[0] * choices[1])
        self._copies, self._next = copies, 0
        self._turns = [
            (Slot(), copies.staging((numbers,), torch.int64), copies.staging((factors,), torch.float32))
            for _ in range(TURNS)
        ]

    def upload(
        self, tables: list[torch.Tensor], weights: torch.Tensor | None = None
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """The same on the device; the caller's stream comes after the copies.

        Args:
            tables: int64 on the CPU, any shapes. weights: float32 on the CPU.
        """
        slot, numbers, factors = self._turns[self._next]
        self._next = (self._next + 1) % TURNS
        self._copies.reuse(slot)
        delivery = self._copies.delivery(slot)
        sizes = [each.numel() for each in tables]
        staged = torch.cat([each.flatten() for each in tables], out=numbers[: sum(sizes)])
        there = delivery.empty((len(staged),), torch.int64)
        delivery.copy(there, staged)
        moved = None
        if weights is not None:
            factors[: weights.numel()].copy_(weights.flatten())
            moved = delivery.empty(tuple(weights.shape), torch.float32)
            delivery.copy(moved.view(-1), factors[: weights.numel()])
        delivery.finish()
        split = torch.split(there, sizes)
        return [part.view(table.shape) for part, table in zip(split, tables, strict=True)], moved

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        tensors = [self.ids, self.weights, *(t for _, *turn in self._turns for t in turn)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def drain(self) -> None:
        """Returns once no copy reads any of it."""
        for slot, _, _ in self._turns:
            self._copies.reuse(slot)


DISPATCH, COMBINE = 0, 1  # the numbers of csrc/exchange/common/layout.hpp


@dataclass(frozen=True, slots=True)
class SumTable:
    """Rows that are sums of other rows, in order; on the CPU.

    slots: [M] int64, where each goes. terms: [M, W] int64 rows, -1 = no more. weights: [M, W] float32.
    """

    slots: torch.Tensor
    terms: torch.Tensor
    weights: torch.Tensor


class RowsCombine(InnerCombine):
    """A combine whose answers return to the device. In place of recv(): sums(), then release()."""

    __slots__ = ()

    @property
    def bank(self) -> int:
        """In which answers arrive."""
        return self._state.bank

    def sums(self) -> SumTable:
        """Waits for all answers. Terms are slots of arrived(bank). Raises as recv()."""
        exchange, state = self._exchange, self._state
        opened = exchange._native or exchange._open()
        if state.received:
            raise InvalidArgument("combine", f"epoch {state.epoch}", "received once")
        opened.combine_recv(state, 0)
        shape = (self._tokens, exchange.spec.top_k)
        terms, weights = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.float32)
        opened.sum_table(state, terms.data_ptr(), weights.data_ptr(), shape[1])
        return SumTable(torch.arange(shape[0]), terms, weights)

    def release(self) -> None:
        """Gives the bank back to the senders: its answers have been read."""
        (self._exchange._native or self._exchange._open()).combine_release(self._state)


class RowsFabric(FabricExchange):
    """One rank's end; connected as a FabricExchange is. Its ranks share no memory with others of their host.

    Args:
        rows: of this spec; registered until close().
    Raises: as FabricExchange; StartupError where the provider does not reach the device's memory.
    """

    def __init__(
        self,
        spec: ExchangeSpec,
        rows: DeviceRows,
        options: FabricOptions | None = None,
        waiting: Waiting | None = None,
    ) -> None:
        super().__init__(spec, options, waiting, rows=rows)
        self.rows = rows  # last: what is dropped unclosed ends its registration before this memory is freed

    @property
    def generation(self) -> int:
        """Changes with reset(), which drops what was under way."""
        return self._open().generation

    def next_bank(self, op: int) -> int:
        """Waits until the bank of the next send may be filled. op: DISPATCH, COMBINE. Raises as that send."""
        return self._open().open_bank(op)

    def send_rows(self, ids: torch.Tensor, weights: torch.Tensor | None) -> InnerDispatch:
        """dispatch_send of rows that are in rows.put()'s place.

        Args:
            ids: [T, K] int64, weights: [T, K] float32; CPU.
        """
        if weights is None and self.spec.reduction == Reduction.RANK:
            raise InvalidArgument("topk_weights", None, "given at dispatch for reduction rank")
        address = 0 if weights is None else weights.data_ptr()
        return InnerDispatch(self, self._open().dispatch_send(0, ids.data_ptr(), address, len(ids)))

    def answers(self, received: Received, reduction: Reduction | None) -> SumTable:
        """What goes into leaving(bank), and into arrived(bank) for this rank itself; by slot, ascending rank.

        Terms are rows in COMPACT order. Raises InvalidArgument for a reduction that has no slots.
        """
        state, spec, chosen = self._state_of(received), self.spec, self.checked_reduction(reduction)
        alone = chosen is Reduction.SOURCE
        width = 1 if alone else max(1, min(spec.top_k, self.views.num_local))
        room = state.num_rows
        slots = torch.empty(room, dtype=torch.int64)
        terms = torch.empty((room, width), dtype=torch.int64)
        weights = torch.empty((room, width), dtype=torch.float32)
        places = (slots.data_ptr(), terms.data_ptr(), weights.data_ptr())
        made = self._open().output_table(state, REDUCTIONS.index(chosen), *places, width)
        return SumTable(slots[:made], terms[:made], weights[:made])

    def send_answers(
        self, received: Received, weights: torch.Tensor | None, reduction: Reduction | None
    ) -> RowsCombine:
        """combine_send of answers that are in their places. weights: [T, K] on the CPU, as there."""
        state = self._state_of(received)
        return RowsCombine(self, self._combine(state, 0, weights, reduction)._state, state.tokens)


Held = tuple[int, Arrival, Callable[[], None]]  # generation; waits for the device; gives a bank back


class GpuDirect:
    """See device.RowStaging. inner: with rows on the device; stays the caller's."""

    def __init__(self, inner: RowsFabric, copies: Copies) -> None:
        self._inner, self.rows, self._copies = inner, inner.rows, copies
        self._tables, self._held = Staging(inner.spec, inner.views, copies), list[Held]()
        self._visible = visible_on(inner.rows.inbound.device)

    @property
    def memory_bytes(self) -> int:
        """Device memory that is registered."""
        return self.rows.bytes

    @property
    def staging_bytes(self) -> int:
        """Of routing and tables."""
        return self._tables.bytes

    def drain(self) -> None:
        """As RowStaging says."""
        held, self._held = self._held, []
        self._tables.drain()
        for _, read, _ in held:
            read()

    def begin_dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None
    ) -> Outgoing[InnerDispatch]:
        """As RowStaging says."""
        self._copies.check_stream()
        self._give_back()
        self.rows.put(self._inner.next_bank(DISPATCH), x)
        staged_ids, staged_weights = self._tables.ids[: len(x)], None
        pairs = [(staged_ids, ids)]
        if weights is not None:
            staged_weights = self._tables.weights[: len(x)]
            pairs.append((staged_weights, weights))
        return Outgoing(self._copies.fetch(*pairs), lambda: self._inner.send_rows(staged_ids, staged_weights))

    def begin_combine(self, answers: Answers) -> Outgoing[InnerCombine]:
        """As RowStaging says."""
        pairs, weights = [], None
        if answers.weights is not None:
            weights = self._tables.weights[: answers.tokens]
            pairs.append((weights, answers.weights))
        self._copies.check_stream()
        self._give_back()
        table = self._inner.answers(answers.inner, answers.reduction)
        self._put_answers(self._inner.next_bank(COMBINE), answers.rows, table)
        return Outgoing(
            self._copies.fetch(*pairs),
            lambda: self._inner.send_answers(answers.inner, weights, answers.reduction),
        )

    def bring(self, inner: Received, wanted: Wanted) -> Brought:
        """As RowStaging says: gathered on the caller's stream."""
        assert inner.row_ids is not None
        used, entry = torch.unique(inner.row_ids, return_inverse=True)
        tables, _ = self._tables.upload([inner.counts.long(), used, *wanted.tables(inner, entry)])
        self._visible.flush()
        front, end = wanted.front, wanted.front + len(used)
        made = []
        for region in [inner.rows] if inner.scales is None else [inner.rows, inner.scales]:
            out = region.new_empty((max(wanted.length, end), region.shape[1]))
            torch.index_select(as_bytes(region), 0, tables[1], out=as_bytes(out[front:end]))
            made.append(out)
        self._hold(partial(self._inner.release, inner))
        return Brought(tables[0].to(torch.int32), tables[2:], made)

    def result(self, inner: InnerCombine, tokens: int, out: torch.Tensor | None) -> torch.Tensor:
        """As RowStaging says: made on the caller's stream."""
        assert isinstance(inner, RowsCombine)
        table = inner.sums()
        (terms,), weights = self._tables.upload([table.terms], table.weights)
        assert weights is not None
        self._visible.flush()
        total = ordered_sum(self.rows.arrived(inner.bank), terms, weights)
        self._hold(inner.release)
        return total.to(self._inner.combine_dtype) if out is None else out.copy_(total)

    def _put_answers(self, bank: int, rows: torch.Tensor, table: SumTable) -> None:
        """Sums of the experts' rows to where they are sent from; this rank's own to where they arrive."""
        if not len(table.slots):
            return
        rank, width = self._inner.spec.rank, self.rows.slots_per_rank
        first, last = torch.searchsorted(table.slots, torch.tensor([rank, rank + 1]) * width).tolist()
        (slots, terms), weights = self._tables.upload([table.slots, table.terms], table.weights)
        assert weights is not None
        total = ordered_sum(rows, terms, weights).to(self._inner.combine_dtype)
        leaving = self.rows.leaving(bank)
        for part, to in (
            (slice(0, first), leaving),
            (slice(first, last), self.rows.arrived(bank)),
            (slice(last, None), leaving),
        ):
            to.index_copy_(0, slots[part], total[part])

    def _hold(self, release: Callable[[], None]) -> None:
        """Notes a bank that the caller's stream reads up to here."""
        self._held.append((self._inner.generation, self._copies.fetch(), release))

    def _give_back(self) -> None:
        """Gives back all banks that were noted; a reset has given back older ones."""
        held, self._held = self._held, []
        for generation, read, release in held:
            read()
            if generation == self._inner.generation:
                release()
