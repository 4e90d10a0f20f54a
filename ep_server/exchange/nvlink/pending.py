"""Operations on GPUs whose second half has not run, as callers hold them; what the host knows of banks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ep_server.errors import HookNotCalled, InvalidArgument
from ep_server.exchange.api import Received, View
from ep_server.exchange.nvlink.launch import RECV, Launcher
from ep_server.exchange.nvlink.requests import CombineMode, CombineTensors, Handle, Receipt
from ep_server.exchange.nvlink.shapes import choose
from ep_server.exchange.views import Tensors

DISPATCH, COMBINE = "dispatch", "combine"


class PendingDispatch:
    """A dispatch whose send half has run. See exchange.PendingDispatch.

    Args:
        launcher: of the exchange; raises InvalidArgument once that is closed.
    """

    def __init__(self, launcher: Callable[[], Launcher], handle: Handle) -> None:
        self._launcher, self.handle = launcher, handle

    def recv(
        self,
        view: View = View.COMPACT,
        *,
        out: Tensors | None = None,
        counts: torch.Tensor | None = None,
        capacity: int | None = None,
        source_map: bool = False,
        expert_stats: torch.Tensor | None = None,
        wait_stats: torch.Tensor | None = None,
        most_tokens: int | None = None,
    ) -> Received:
        """As the Protocol says, on the current stream. Keywords: see requests.Receipt.

        Without a capacity a COMPACT or INDEX view is cut to what came, for which the host waits, unless the
        call is captured. More rows than the capacity fail as InvalidArgument at the next call.
        """
        if self.handle.received:
            raise InvalidArgument("dispatch", "received", "received once")
        view = choose("view", View, view)
        receipt = Receipt(view, out, counts, capacity, source_map, expert_stats, wait_stats, most_tokens)
        return self._launcher().receive(self.handle, None, receipt)


class PendingCombine:
    """A combine whose send half has run. See exchange.PendingCombine. launcher: as above."""

    def __init__(
        self,
        launcher: Callable[[], Launcher],
        handle: Handle,
        weights: torch.Tensor | None,
        mode: CombineMode,
    ) -> None:
        self._launcher, self._handle, self._weights, self._mode = launcher, handle, weights, mode
        self.received = False

    def recv(
        self, out: torch.Tensor | None = None, *, wait_stats: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As the Protocol says, on the current stream. wait_stats: [R] int64, += ns waited for each rank."""
        if self.received:
            raise InvalidArgument("combine", "received", "received once")
        launcher = self._launcher()
        out = launcher.shapes.result(self._handle, out)
        tensors = CombineTensors(None, self._weights, out, wait_stats)
        launcher.combine(RECV, self._handle, self._mode, tensors)
        self.received, self._handle.answering = True, False
        return out


class Flights:
    """The operation that each bank carries, as far as the host knows: a graph's replays pass it by.

    A bank that comes round unread is reported here, before a kernel waits for it in vain.
    """

    def __init__(self, rank: int, num_banks: int) -> None:
        self._rank = rank
        self._banks: dict[str, list[Handle | PendingCombine | None]] = {
            op: [None] * num_banks for op in (DISPATCH, COMBINE)
        }
        self._sends = {DISPATCH: 0, COMBINE: 0}

    def check(self, op: str) -> None:
        """Raises HookNotCalled where the next bank was not received or released here."""
        banks = self._banks[op]
        before = banks[self._sends[op] % len(banks)]
        if before is None or torch.cuda.is_current_stream_capturing():
            return
        if not before.received or (isinstance(before, Handle) and before.held):
            what = f"{op} takes a bank that was not received or released here"
            raise HookNotCalled(f"rank {self._rank}: {what}")

    def take(self, op: str, flight: Handle | PendingCombine | None) -> None:
        """The next bank carries `flight`; None = an operation that is over."""
        if torch.cuda.is_current_stream_capturing():
            return  # a graph has no host beside it: the kernels look after its banks
        banks = self._banks[op]
        banks[self._sends[op] % len(banks)] = flight
        self._sends[op] += 1
