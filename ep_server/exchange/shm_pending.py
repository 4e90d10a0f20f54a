"""Operations of a ShmExchange whose second half has not run, as callers hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ep_server import _C
from ep_server.errors import InvalidArgument
from ep_server.exchange.api import Received, View
from ep_server.exchange.tensors import check_tensor, fits
from ep_server.exchange.views import Tensors

if TYPE_CHECKING:
    from ep_server.exchange.shm import ShmExchange

VIEWS = {View.COMPACT: 0, View.PADDED: 1, View.INDEX: 2}  # the numbers of csrc/exchange/common/params.hpp


class PendingDispatch:
    """A dispatch whose send half has run. See exchange.PendingDispatch."""

    __slots__ = ("_exchange", "_state", "_waited")

    def __init__(self, exchange: ShmExchange, state: _C.DispatchState) -> None:
        self._exchange, self._state = exchange, state
        self._waited = False

    def recv(self, view: View = View.COMPACT, *, out: Tensors | None = None) -> Received:
        """As the Protocol says. INDEX rows stay valid until combine_send or release().

        Args:
            out: rows and scales of an earlier empty_padded(), filled instead of new ones; PADDED only.
        """
        exchange, state = self._exchange, self._state
        native = exchange._native or exchange._open()
        if view not in VIEWS:
            view = View(view)
        if self._waited:
            raise InvalidArgument("dispatch", f"epoch {state.epoch}", "received once")
        if out is not None:
            exchange.views.check_out(view, out)
        native.dispatch_wait(state)
        self._waited = True
        return exchange._expand(state, view, out)

    @property
    def wait_ns(self) -> torch.Tensor:
        """[R] int64: how long recv() waited for each source's header."""
        return torch.tensor(self._state.wait_ns(self._exchange.spec.num_ranks), dtype=torch.int64)


class PendingCombine:
    """A combine whose send half has run. See exchange.PendingCombine."""

    __slots__ = ("_exchange", "_state", "_tokens")

    def __init__(self, exchange: ShmExchange, state: _C.CombineState, tokens: int) -> None:
        self._exchange, self._state, self._tokens = exchange, state, tokens

    def recv(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """As the Protocol says."""
        exchange, state = self._exchange, self._state
        native = exchange._native or exchange._open()
        if state.received:
            raise InvalidArgument("combine", f"epoch {state.epoch}", "received once")
        shape, dtype = (self._tokens, exchange.spec.hidden), exchange.combine_dtype
        if out is None:
            out = torch.empty(shape, dtype=dtype)
        elif not fits(out, dtype, shape):
            check_tensor("out", out, dtype, T=shape[0], H=shape[1])
        native.combine_recv(state, out.data_ptr())
        return out

    @property
    def wait_ns(self) -> torch.Tensor:
        """[R] int64: how long recv() waited for each rank's header."""
        return torch.tensor(self._state.wait_ns(self._exchange.spec.num_ranks), dtype=torch.int64)
