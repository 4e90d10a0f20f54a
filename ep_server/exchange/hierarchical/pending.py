"""Operations of a HierarchicalExchange whose second half has not run; the Protocol of its intra-host part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from ep_server.exchange.api import Exchange, PendingCombine, PendingDispatch, Received, Reduction, View
from ep_server.exchange.fabric.host_pending import PendingCombine as InterCombine
from ep_server.exchange.fabric.host_pending import PendingDispatch as InterDispatch
from ep_server.exchange.fabric.host_pending import checked_view
from ep_server.exchange.hierarchical.host_part import Joined
from ep_server.exchange.tensors import check_tensor_on

if TYPE_CHECKING:
    from ep_server.exchange.hierarchical.exchange import HierarchicalExchange


class IntraExchange(Exchange, Protocol):
    """The exchange inside a host: a NvlinkExchange, or one that does the same on other tensors."""

    def combine_send(
        self,
        expert_out: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        *,
        reduction: Reduction | None = None,
    ) -> PendingCombine:
        """As NvlinkExchange has it."""
        ...


@dataclass(frozen=True, slots=True)
class Handle:
    """What combine_send needs. intra, inter: as the two exchanges received them. tokens: T."""

    intra: Received
    inter: Received
    joined: Joined
    tokens: int
    owner: HierarchicalExchange


class HierarchicalDispatch:
    """A dispatch whose send half has run. See exchange.PendingDispatch."""

    __slots__ = ("_exchange", "_inter", "_intra", "_tokens")

    def __init__(
        self, exchange: HierarchicalExchange, intra: PendingDispatch, inter: InterDispatch, tokens: int
    ) -> None:
        self._exchange, self._intra, self._inter, self._tokens = exchange, intra, inter, tokens

    def recv(self, view: View = View.COMPACT) -> Received:
        """As the Protocol says, on the caller's stream. INDEX costs least: rows are a copy, without repeats
        of what came from other hosts, and as many as came.
        """
        view = checked_view(view)
        # First those of all ranks: who is missing is named, and told, as between hosts.
        inter = self._inter.inner.recv(View.INDEX)
        return self._exchange.finish_recv(self._intra, inter, self._tokens, view)

    @property
    def wait_ns(self) -> torch.Tensor:
        """[R] int64 on the CPU: how long recv() waited for each source's header."""
        return self._inter.wait_ns


class HierarchicalCombine:
    """A combine whose send half has run. See exchange.PendingCombine."""

    __slots__ = ("_exchange", "_inter", "_intra", "_tokens")

    def __init__(
        self, exchange: HierarchicalExchange, intra: PendingCombine, inter: InterCombine, tokens: int
    ) -> None:
        self._exchange, self._intra, self._inter, self._tokens = exchange, intra, inter, tokens

    def recv(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """As the Protocol says, on the caller's stream."""
        exchange, form = self._exchange, self._exchange.inter.form
        if out is not None:
            check_tensor_on(form.device, "out", out, form.dtype, T=self._tokens, H=form.hidden)
        inter = self._inter.recv()
        with exchange.named():
            intra = self._intra.recv()
        return torch.add(intra, inter, out=out)  # in float32, also of bfloat16

    @property
    def wait_ns(self) -> torch.Tensor:
        """[R] int64 on the CPU: how long recv() waited for each rank's header."""
        return self._inter.wait_ns
