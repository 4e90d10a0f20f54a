"""A FabricExchange whose rows lie on a device: the card reads and writes them there.

Here are the halves without their rows: routing, headers and waiting stay on the host. Who moves the rows
(direct.py) asks for the bank first, fills it on the device, waits for that, then sends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ep_server.errors import InvalidArgument
from ep_server.exchange.api import ExchangeSpec, Received, Reduction
from ep_server.exchange.fabric.device_rows import DeviceRows
from ep_server.exchange.fabric.exchange import FabricExchange
from ep_server.exchange.fabric.settings import FabricOptions
from ep_server.exchange.geometry import REDUCTIONS
from ep_server.exchange.shm_pending import PendingCombine, PendingDispatch
from ep_server.exchange.waiting import Waiting

DISPATCH, COMBINE = 0, 1  # the numbers of csrc/exchange/common/layout.hpp


@dataclass(frozen=True, slots=True)
class SumTable:
    """Rows that are sums of other rows, in order; on the CPU.

    slots: [M] int64, where each goes. terms: [M, W] int64 rows, -1 = no more. weights: [M, W] float32.
    """

    slots: torch.Tensor
    terms: torch.Tensor
    weights: torch.Tensor


class RowsCombine(PendingCombine):
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

    def send_rows(self, ids: torch.Tensor, weights: torch.Tensor | None) -> PendingDispatch:
        """dispatch_send of rows that are in rows.put()'s place.

        Args:
            ids: [T, K] int64, weights: [T, K] float32; CPU.
        """
        if weights is None and self.spec.reduction == Reduction.RANK:
            raise InvalidArgument("topk_weights", None, "given at dispatch for reduction rank")
        address = 0 if weights is None else weights.data_ptr()
        return PendingDispatch(self, self._open().dispatch_send(0, ids.data_ptr(), address, len(ids)))

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
