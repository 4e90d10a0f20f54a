"""GPU direct: staging in which the NIC reads and writes rows in the memory of the device.

A send enqueues its work on the caller's stream: rows to where they are sent from, sums of the experts'
outputs. The host waits for that, then sends; routing and headers are on the host. Received rows are gathered
where they arrived. A bank that the device still has to read is given back to the senders with this rank's
next send, after a wait for that read. The arithmetic is that of the CPU, bit for bit. No network card has run
it yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ep_server import _C
from ep_server.errors import ConfigError, StartupError
from ep_server.exchange.api import PendingDispatch, Received, Reduction
from ep_server.exchange.fabric.copies import Arrival, Copies, Slot, copies_for, visible_on
from ep_server.exchange.fabric.device_rows import DeviceRows
from ep_server.exchange.fabric.host_staging import ExpertOutputs, Outgoing, ReceivedRows, ReceiveSums, Tables
from ep_server.exchange.fabric.settings import FabricOptions
from ep_server.exchange.host import HostExchange, HostHandle
from ep_server.exchange.row_order import as_bytes, ordered_sum, places
from ep_server.exchange.shapes import Shapes
from ep_server.exchange.spec import REDUCTIONS, ExchangeSpec
from ep_server.exchange.validate import handle_of

LOG = logging.getLogger(__name__)
UPLOADS = 4  # on their way at once
DISPATCH, COMBINE = 0, 1  # the numbers of csrc/exchange/common/layout.hpp
DEVICE_MEMORY = ("auto", "hmem", "host")


def rows_on_device(
    device_memory: str, spec: ExchangeSpec, device: torch.device, options: FabricOptions
) -> DeviceRows | None:
    """Memory of the device for the NIC, or None where rows travel through host memory. Decides which.

    Args:
        device_memory: hmem = the NIC reads and writes the device's memory; host = through host memory;
          auto = host, until hmem has run on a network card. All ranks choose alike.
    Raises: ConfigError for another word; StartupError naming provider and capability where hmem cannot be.
    """
    if device_memory not in DEVICE_MEMORY:
        raise ConfigError("device_memory", device_memory, f"one of {', '.join(DEVICE_MEMORY)}")
    if device_memory != "hmem":
        if device_memory == "auto" and device.type != "cpu":
            LOG.info(
                "rows travel through host memory: exchange.device_memory = auto does not choose hmem, "
                "which has not run on a network card yet"
            )
        return None
    visible_on(device)  # raises where kernels would not see the rows
    _C.fabric_chosen(options.native(device_memory=True))  # raises where no provider reaches the memory
    try:
        rows = DeviceRows.allocate(spec, device)
    except torch.OutOfMemoryError as error:
        raise StartupError(f"{device} has no room for the rows of the exchange: {error}") from error
    # Kernels of the memory's last user may still be queued, and NICs do not wait for streams.
    copies_for(device, spec.timeout_ns).fetch()()
    LOG.info(
        "the network card reads and writes rows on %s itself: %.1f MiB are registered (FI_HMEM)",
        device,
        rows.bytes / 2**20,
    )
    return rows


class TableStaging:
    """Routing on its way to the host, tables on their way to the device.

    ids, weights: of this rank's tokens.
    """

    def __init__(self, shapes: Shapes, copies: Copies) -> None:
        spec, entries, rows = shapes.spec, shapes.most_rows, shapes.padded_rows
        choices = (spec.max_tokens, spec.top_k)
        self.ids = copies.staging(choices, torch.int64)
        self.weights = copies.staging(choices, torch.float32)
        numbers = max(
            3 * entries + 3 * shapes.num_local + 1 + rows, 2 * entries + rows, choices[0] * choices[1]
        )
        factors = max(entries, rows, choices[0] * choices[1])
        self._copies, self._next = copies, 0
        self._uploads = [
            (Slot(), copies.staging((numbers,), torch.int64), copies.staging((factors,), torch.float32))
            for _ in range(UPLOADS)
        ]

    def upload(
        self, tables: list[torch.Tensor], weights: torch.Tensor | None = None
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """The same on the device; the caller's stream continues after the copies.

        Args:
            tables: int64 on the CPU, any shapes. weights: float32 on the CPU.
        """
        slot, numbers, factors = self._uploads[self._next]
        self._next = (self._next + 1) % UPLOADS
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
        uploads = [each for _, *tensors in self._uploads for each in tensors]
        return sum(tensor.nbytes for tensor in (self.ids, self.weights, *uploads))

    def drain(self) -> None:
        """Returns once no copy reads any of it."""
        for slot, _, _ in self._uploads:
            self._copies.reuse(slot)


@dataclass(frozen=True, slots=True)
class SumTable:
    """Rows that are sums of other rows, in order; on the CPU.

    slots: [M] int64, where each goes. terms: [M, W] int64 rows, -1 = no more. weights: [M, W] float32.
    """

    slots: torch.Tensor
    terms: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def empty(cls, rows: int, width: int) -> SumTable:
        """Room for so many sums, each of at most `width` terms."""
        terms = torch.empty((rows, width), dtype=torch.int64)
        weights = torch.empty((rows, width), dtype=torch.float32)
        return cls(torch.empty(rows, dtype=torch.int64), terms, weights)


Held = tuple[int, Arrival, Callable[[], None]]  # generation; waits for the device; gives a bank back


class GpuDirect:
    """See RowStaging.

    Args:
        inner: over a link that has registered `rows`; stays the caller's.
    """

    def __init__(self, inner: HostExchange, rows: DeviceRows, copies: Copies) -> None:
        self._inner, self.rows, self._copies = inner, rows, copies
        self._tables, self._held = TableStaging(inner.shapes, copies), list[Held]()
        self._visible = visible_on(rows.inbound.device)

    @property
    def memory_bytes(self) -> int:
        """As RowStaging says: what is registered."""
        return self.rows.bytes

    @property
    def staging_bytes(self) -> int:
        """As RowStaging says: routing and tables."""
        return self._tables.bytes

    def drain(self) -> None:
        """As RowStaging says."""
        held, self._held = self._held, []
        self._tables.drain()
        for _, read, _ in held:
            read()

    def begin_dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None
    ) -> Outgoing[PendingDispatch]:
        """As RowStaging says."""
        self._copies.check_stream()
        self._give_back()
        self.rows.put(self.next_bank(DISPATCH), x)
        staged_ids, staged_weights = self._tables.ids[: len(x)], None
        pairs = [(staged_ids, ids)]
        if weights is not None:
            staged_weights = self._tables.weights[: len(x)]
            pairs.append((staged_weights, weights))
        return Outgoing(
            self._copies.fetch(*pairs), lambda: self._inner.start_dispatch(0, staged_ids, staged_weights)
        )

    def begin_combine(self, outputs: ExpertOutputs) -> Outgoing[ReceiveSums]:
        """As RowStaging says."""
        pairs, weights = [], None
        if outputs.weights is not None:
            weights = self._tables.weights[: outputs.tokens]
            pairs.append((weights, outputs.weights))
        self._copies.check_stream()
        self._give_back()
        handle: HostHandle = handle_of(outputs.inner, self._inner)
        table = self._output_table(handle, outputs.reduction)
        self._put_outputs(self.next_bank(COMBINE), outputs.rows, table)

        def send() -> ReceiveSums:
            state = self._inner.start_combine(handle, 0, weights, outputs.reduction)
            return lambda out: self._sums(state, outputs.tokens, out)

        return Outgoing(self._copies.fetch(*pairs), send)

    def copy_received(
        self, inner: Received, tables: Tables = places, *, front: int = 0, length: int = 0
    ) -> ReceivedRows:
        """As RowStaging says: gathered on the caller's stream."""
        assert inner.row_ids is not None
        used, entry = torch.unique(inner.row_ids, return_inverse=True)
        numbers, _ = self._tables.upload([inner.counts.long(), used, *tables(inner, entry)])
        self._visible.flush()
        end, rows = front + len(used), []
        for region in [inner.rows] if inner.scales is None else [inner.rows, inner.scales]:
            out = region.new_empty((max(length, end), region.shape[1]))
            torch.index_select(as_bytes(region), 0, numbers[1], out=as_bytes(out[front:end]))
            rows.append(out)
        self._hold(partial(self._inner.release, inner))
        return ReceivedRows(numbers[0].to(torch.int32), numbers[2:], rows)

    def next_bank(self, op: int) -> int:
        """Waits until the bank of the next send may be filled. op: DISPATCH, COMBINE. Raises as that send."""
        return self._native.open_bank(op)

    @property
    def _native(self) -> _C.Exchange:
        return self._inner.group.native

    def _output_table(self, handle: HostHandle, reduction: Reduction) -> SumTable:
        """What goes into leaving(bank), and into arrived(bank) for this rank itself; by slot, ascending rank.

        Terms are rows in COMPACT order.
        """
        spec = self._inner.spec
        source = reduction is Reduction.SOURCE
        width = 1 if source else max(1, min(spec.top_k, self._inner.shapes.num_local))
        table = SumTable.empty(handle.state.num_rows, width)
        addresses = (table.slots.data_ptr(), table.terms.data_ptr(), table.weights.data_ptr())
        made = self._native.output_table(handle.state, REDUCTIONS.index(reduction), *addresses, width)
        return SumTable(table.slots[:made], table.terms[:made], table.weights[:made])

    def _put_outputs(self, bank: int, rows: torch.Tensor, table: SumTable) -> None:
        """Sums of the experts' rows to where they are sent from; this rank's own to where they arrive."""
        if not len(table.slots):
            return
        rank, width = self._inner.spec.rank, self.rows.slots_per_rank
        first, last = torch.searchsorted(table.slots, torch.tensor([rank, rank + 1]) * width).tolist()
        (slots, terms), weights = self._tables.upload([table.slots, table.terms], table.weights)
        assert weights is not None
        total = ordered_sum(rows, terms, weights).to(self._inner.shapes.combine_dtype)
        leaving = self.rows.leaving(bank)
        for part, to in (
            (slice(0, first), leaving),
            (slice(first, last), self.rows.arrived(bank)),
            (slice(last, None), leaving),
        ):
            to.index_copy_(0, slots[part], total[part])

    def _sums(self, state: _C.CombineState, tokens: int, out: torch.Tensor | None) -> torch.Tensor:
        """Waits for all returning rows; the sums on the caller's stream."""
        self._native.combine_recv(state, 0)
        table = SumTable.empty(tokens, self._inner.spec.top_k)  # terms: slots of arrived(bank)
        addresses = table.terms.data_ptr(), table.weights.data_ptr()
        self._native.sum_table(state, *addresses, self._inner.spec.top_k)
        (terms,), weights = self._tables.upload([table.terms], table.weights)
        assert weights is not None
        self._visible.flush()
        total = ordered_sum(self.rows.arrived(state.bank), terms, weights)
        self._hold(partial(self._native.combine_release, state))
        return total.to(self._inner.shapes.combine_dtype) if out is None else out.copy_(total)

    def _hold(self, release: Callable[[], None]) -> None:
        """Notes a bank that the caller's stream reads up to here."""
        self._held.append((self._native.generation, self._copies.fetch(), release))

    def _give_back(self) -> None:
        """Gives back all noted banks; a reset has given back older ones."""
        held, self._held = self._held, []
        for generation, read, release in held:
            read()
            if generation == self._native.generation:
                release()
