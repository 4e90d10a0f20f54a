"""Operations of a FabricDeviceExchange, before and after their send half, as callers hold them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from ep_server.errors import InvalidArgument
from ep_server.exchange.api import Received, Reduction, View
from ep_server.exchange.fabric.copies import Arrival
from ep_server.exchange.row_order import Order
from ep_server.exchange.shm_pending import PendingCombine as NativeCombine
from ep_server.exchange.shm_pending import PendingDispatch as NativeDispatch

if TYPE_CHECKING:
    from ep_server.exchange.fabric.host_staging import FabricDeviceExchange

Sent = TypeVar("Sent")


@dataclass(frozen=True, slots=True)
class Handle:
    """What combine_send needs. inner: as the inner exchange received it. order: on the device. tokens: T."""

    inner: Received
    order: Order
    tokens: int
    owner: FabricDeviceExchange


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


class PendingDispatch:
    """A dispatch whose send half has run. See exchange.PendingDispatch."""

    __slots__ = ("_exchange", "_tokens", "inner")

    def __init__(self, exchange: FabricDeviceExchange, inner: NativeDispatch, tokens: int) -> None:
        self._exchange, self.inner, self._tokens = exchange, inner, tokens

    def recv(self, view: View = View.COMPACT) -> Received:
        """As the Protocol says, on the caller's stream. INDEX rows are a copy, reordered: see row_ids."""
        view = checked_view(view)
        return self._exchange.finish_recv(self.inner.recv(View.INDEX), self._tokens, view)

    @property
    def wait_ns(self) -> torch.Tensor:
        """[R] int64 on the CPU: how long recv() waited for each source's header."""
        return self.inner.wait_ns


class PendingCombine:
    """A combine whose send half has run. See exchange.PendingCombine."""

    __slots__ = ("_exchange", "_inner", "_tokens")

    def __init__(self, exchange: FabricDeviceExchange, inner: NativeCombine, tokens: int) -> None:
        self._exchange, self._inner, self._tokens = exchange, inner, tokens

    def recv(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """As the Protocol says, on the caller's stream."""
        return self._exchange.copy_result(self._inner, self._tokens, out)

    @property
    def wait_ns(self) -> torch.Tensor:
        """[R] int64 on the CPU: how long recv() waited for each rank's header."""
        return self._inner.wait_ns


def checked_view(view: View | str) -> View:
    """The view of this name, or InvalidArgument."""
    try:
        return View(view)
    except ValueError:
        raise InvalidArgument("view", view, f"one of {', '.join(View)}") from None
