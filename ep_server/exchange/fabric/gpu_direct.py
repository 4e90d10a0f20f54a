"""The exchange between hosts whose rows never are in host memory: cards read and write those of the device.

What a send needs of the device is enqueued on the caller's stream: rows to where they are sent from, sums of
the experts' answers. The host waits for it, then sends; routing and headers are on the host, as ever. What
came is gathered where it arrived. A bank that the device still has to read goes back to the senders with this
rank's next send, after a wait for that reading. Arithmetic is that of the CPU, bit for bit.

The Protocol, and what HierarchicalExchange asks of its far part, are those of bounce.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ep_server.exchange.api import Received
from ep_server.exchange.fabric.copies import Arrival, Copies
from ep_server.exchange.fabric.direct_buffers import Staging
from ep_server.exchange.fabric.host_buffers import Brought, Wanted
from ep_server.exchange.fabric.host_pending import Answers, Outgoing, PendingCombine, PendingDispatch
from ep_server.exchange.fabric.host_staging import FabricDeviceExchange
from ep_server.exchange.fabric.remote_writes import Visible, visible_on
from ep_server.exchange.fabric.rows import COMBINE, DISPATCH, RowsCombine, RowsFabric, SumTable
from ep_server.exchange.ordered_sum import ordered_sum
from ep_server.exchange.row_order import as_bytes
from ep_server.exchange.shm_pending import PendingCombine as NativeCombine
from ep_server.exchange.tensors import check_tensor_on

Held = tuple[int, Arrival, Callable[[], None]]  # generation; waits for the device; gives a bank back


class GpuDirectExchange(FabricDeviceExchange):
    """One rank's end of a group. Satisfies exchange.Exchange on tensors of the device that has `inner.rows`.

    Args:
        inner: owned by this one from now on.
        visible: makes what cards wrote visible to the device's kernels; None = as its driver has it.
        copies: in place of those of the device; for tests.
    """

    inner: RowsFabric

    def __init__(
        self, inner: RowsFabric, *, visible: Visible | None = None, copies: Copies | None = None
    ) -> None:
        self.rows, self._held = inner.rows, list[Held]()
        device = inner.rows.inbound.device
        super().__init__(inner, device, copies=copies)
        self._visible = visible or visible_on(device)

    def _allocate(self) -> None:
        self._tables = Staging(self.spec, self.inner.views, self._copies)

    def close(self) -> None:
        """As the Protocol says. Waits for what the device still reads."""
        held, self._held = self._held, []
        try:
            self._tables.drain()
            for _, read, _ in held:
                read()
        finally:
            self.inner.close()

    @property
    def memory_bytes(self) -> int:
        """Device memory that is registered."""
        return self.rows.bytes

    def begin_dispatch(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> Outgoing[PendingDispatch]:
        """dispatch_send in two: checks the tensors and begins their copies; send() is the rest."""
        tokens = self.check_tokens(x, topk_ids, topk_weights)
        self._copies.check_stream()
        self._give_back()
        self.rows.put(self.inner.next_bank(DISPATCH), x)
        staged_ids, weights = self._tables.ids[:tokens], None
        pairs = [(staged_ids, topk_ids)]
        if topk_weights is not None:
            weights = self._tables.weights[:tokens]
            pairs.append((weights, topk_weights))

        def send() -> PendingDispatch:
            return PendingDispatch(self, self.inner.send_rows(staged_ids, weights), tokens)

        return Outgoing(self._copies.fetch(*pairs), send)

    def begin_combine(self, answers: Answers) -> Outgoing[PendingCombine]:
        """combine_send in two, of rows in the order of their entries."""
        pairs, weights = [], None
        if answers.weights is not None:
            self._check_weights(answers.weights, answers.tokens)
            weights = self._tables.weights[: answers.tokens]
            pairs.append((weights, answers.weights))
        self._copies.check_stream()
        self._give_back()
        table = self.inner.answers(answers.inner, answers.reduction)
        self._put_answers(self.inner.next_bank(COMBINE), answers.rows, table)

        def send() -> PendingCombine:
            sent = self.inner.send_answers(answers.inner, weights, answers.reduction)
            return PendingCombine(self, sent, answers.tokens)

        return Outgoing(self._copies.fetch(*pairs), send)

    def bring(self, inner: Received, wanted: Wanted) -> Brought:
        """What came, gathered on the caller's stream. inner: an INDEX view, whose rows are on the device."""
        assert inner.row_ids is not None
        used, entry = torch.unique(inner.row_ids, return_inverse=True)
        tables, _ = self._tables.upload([inner.counts.long(), used, *wanted.tables(inner, entry)])
        self._visible.settle()
        front, end = wanted.front, wanted.front + len(used)
        made = []
        for region in [inner.rows] if inner.scales is None else [inner.rows, inner.scales]:
            out = region.new_empty((max(wanted.length, end), region.shape[1]))
            torch.index_select(as_bytes(region), 0, tables[1], out=as_bytes(out[front:end]))
            made.append(out)
        self._hold(partial(self.inner.release, inner))
        return Brought(tables[0].to(torch.int32), tables[2:], made)

    def copy_result(self, inner: NativeCombine, tokens: int, out: torch.Tensor | None) -> torch.Tensor:
        """The sums of a combine, made on the caller's stream."""
        assert isinstance(inner, RowsCombine)
        if out is not None:
            check_tensor_on(self.device, "out", out, self.combine_dtype, T=tokens, H=self.spec.hidden)
        table = inner.sums()
        (terms,), weights = self._tables.upload([table.terms], table.weights)
        assert weights is not None
        self._visible.settle()
        total = ordered_sum(self.rows.arrived(inner.bank), terms, weights)
        self._hold(inner.release)
        return total.to(self.combine_dtype) if out is None else out.copy_(total)

    def _put_answers(self, bank: int, rows: torch.Tensor, table: SumTable) -> None:
        """Sums of the experts' rows to where they are sent from; this rank's own to where they arrive."""
        if not len(table.slots):
            return
        rank, width = self.spec.rank, self.rows.slots_per_rank
        first, last = torch.searchsorted(table.slots, torch.tensor([rank, rank + 1]) * width).tolist()
        (slots, terms), weights = self._tables.upload([table.slots, table.terms], table.weights)
        assert weights is not None
        total = ordered_sum(rows, terms, weights).to(self.combine_dtype)
        leaving = self.rows.leaving(bank)
        for part, to in (
            (slice(0, first), leaving),
            (slice(first, last), self.rows.arrived(bank)),
            (slice(last, None), leaving),
        ):
            to.index_copy_(0, slots[part], total[part])

    def _hold(self, release: Callable[[], None]) -> None:
        """Notes a bank that the caller's stream reads up to here."""
        self._held.append((self.inner.generation, self._copies.fetch(), release))

    def _give_back(self) -> None:
        """Gives back all banks that were noted; a reset has given back older ones."""
        held, self._held = self._held, []
        for generation, read, release in held:
            read()
            if generation == self.inner.generation:
                release()
