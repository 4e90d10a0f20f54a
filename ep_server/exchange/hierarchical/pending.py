"""Operations of a HybridExchange whose second half has not run; what it asks of the exchange of a host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ep_server.exchange.api import Exchange, PendingCombine, PendingDispatch, Received, Reduction, View
from ep_server.exchange.fabric.host_pending import PendingCombine as FarCombine
from ep_server.exchange.fabric.host_pending import PendingDispatch as FarDispatch
from ep_server.exchange.fabric.host_pending import checked_view
from ep_server.exchange.hierarchical.host_part import Joined
from ep_server.exchange.tensors import check_tensor_on

if TYPE_CHECKING:
    from ep_server.exchange.hierarchical.exchange import HybridExchange


class Near(Exchange, Protocol):
    """The exchange inside a host: a CudaExchange, or one that does the same on other tensors."""

    def combine_send(
        self,
        expert_out: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        *,
        reduction: Reduction | None = None,
    ) -> PendingCombine:
        """As CudaExchange has it."""
        ...

    def release(self, received: Received) -> None:
        """Gives the bank of an INDEX view back; its handle still takes a combine."""
        ...

    def statistics(self) -> dict[str, Any]:
        """Cumulative measurements."""
        ...


@dataclass(frozen=True, slots=True)
class Handle:
    """What combine_send needs. near, far: as the two exchanges received them. tokens: T."""

    near: Received
    far: Received
    joined: Joined
    tokens: int
    owner: HybridExchange


class HybridDispatch:
    """A dispatch whose send half has run. See exchange.PendingDispatch."""

    __slots__ = ("_exchange", "_far", "_near", "_tokens")

    def __init__(
        self, exchange: HybridExchange, near: PendingDispatch, far: FarDispatch, tokens: int
    ) -> None:
        self._exchange, self._near, self._far, self._tokens = exchange, near, far, tokens

    def recv(self, view: View = View.COMPACT) -> Received:
        """As the Protocol says, on the caller's stream. INDEX costs least: rows are a copy, without repeats
        of what came from other hosts, and as many as came.
        """
        view = checked_view(view)
        # First those of all ranks: who is missing is named, and told, as between hosts.
        far = self._far.inner.recv(View.INDEX)
        return self._exchange.land(self._near, far, self._tokens, view)

    @property
    def wait_ns(self) -> torch.Tensor:
        """[R] int64 on the CPU: how long recv() waited for each source's header."""
        return self._far.wait_ns


class HybridCombine:
    """A combine whose send half has run. See exchange.PendingCombine."""

    __slots__ = ("_exchange", "_far", "_near", "_tokens")

    def __init__(self, exchange: HybridExchange, near: PendingCombine, far: FarCombine, tokens: int) -> None:
        self._exchange, self._near, self._far, self._tokens = exchange, near, far, tokens

    def recv(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """As the Protocol says, on the caller's stream."""
        exchange, form = self._exchange, self._exchange.far.form
        if out is not None:
            check_tensor_on(form.device, "out", out, form.dtype, T=self._tokens, H=form.hidden)
        far = self._far.recv()
        with exchange.named():
            near = self._near.recv()
        return torch.add(near, far, out=out)  # in float32, also of bfloat16

    @property
    def wait_ns(self) -> torch.Tensor:
        """[R] int64 on the CPU: how long recv() waited for each rank's header."""
        return self._far.wait_ns
