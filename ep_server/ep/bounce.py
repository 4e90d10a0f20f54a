"""The exchange between hosts for tensors of any device: one on the CPU behind staging in host memory.

What is sent is copied to the host and sent from there. What comes is received in place, gathered once for
each token (not for each expert) and copied to the device in chunks, each under way while the next is
gathered; rows are spread over the experts there. A send begins when all of its rows are on the host, as the
inner exchange takes them at once. The host takes part in each half: none can be captured into a CUDA graph.

Beyond the Protocol: statistics() and `inner`, whose membership, faults and failures are those of native.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from ep_server.ep import fabric_bootstrap, native
from ep_server.ep.bounce_copies import Copies, checked_device, copies_for
from ep_server.ep.bounce_staging import Order, Staging
from ep_server.ep.exchange import ExchangeSpec, Received, Reduction, View
from ep_server.ep.fabric import FabricOptions
from ep_server.ep.host_share import HostShare
from ep_server.ep.native import NativeExchange
from ep_server.ep.tensors import check_tensor_on
from ep_server.ep.waiting import Waiting
from ep_server.errors import ConfigError, InvalidArgument


@dataclass(frozen=True, slots=True)
class Handle:
    """What combine_send needs. inner: as the inner exchange received it. order: on the device. tokens: T."""

    inner: Received
    order: Order
    tokens: int
    owner: BounceExchange


class PendingDispatch:
    """A dispatch whose send half has run. See exchange.PendingDispatch."""

    __slots__ = ("_exchange", "_inner", "_tokens")

    def __init__(self, exchange: BounceExchange, inner: native.PendingDispatch, tokens: int) -> None:
        self._exchange, self._inner, self._tokens = exchange, inner, tokens

    def recv(self, view: View = View.COMPACT) -> Received:
        """As the Protocol says, on the caller's stream. INDEX rows are a copy, reordered: see row_ids."""
        try:
            view = View(view)
        except ValueError:
            raise InvalidArgument("view", view, f"one of {', '.join(View)}") from None
        return self._exchange.land(self._inner.recv(View.INDEX), self._tokens, view)

    @property
    def wait_ns(self) -> torch.Tensor:
        """[R] int64 on the CPU: how long recv() waited for each source's header."""
        return self._inner.wait_ns


class PendingCombine:
    """A combine whose send half has run. See exchange.PendingCombine."""

    __slots__ = ("_exchange", "_inner", "_tokens")

    def __init__(self, exchange: BounceExchange, inner: native.PendingCombine, tokens: int) -> None:
        self._exchange, self._inner, self._tokens = exchange, inner, tokens

    def recv(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """As the Protocol says, on the caller's stream."""
        return self._exchange.bring_home(self._inner, self._tokens, out)

    @property
    def wait_ns(self) -> torch.Tensor:
        """[R] int64 on the CPU: how long recv() waited for each rank's header."""
        return self._inner.wait_ns


class BounceExchange:
    """One rank's end of a group. Satisfies exchange.Exchange on tensors of `device`.

    Args:
        inner: an exchange on CPU tensors, which this one owns from now on.
        device: of all tensors given and returned; "cpu" works too.
        gpu_direct: must be False: no card reads GPU memory itself (FI_HMEM, dma-buf) yet.
        copies: in place of those of the device; for tests.
    Raises: ConfigError; StartupError where the device is not there.
    """

    def __init__(
        self,
        inner: NativeExchange,
        device: torch.device | str | int,
        *,
        gpu_direct: bool = False,
        copies: Copies | None = None,
    ) -> None:
        self.inner, self.spec = inner, inner.spec
        try:
            if gpu_direct:
                raise ConfigError("gpu_direct", True, "False: GPU memory is not registered with any card yet")
            self.device = checked_device(device)
            self._copies = copies or copies_for(self.device, self.spec.timeout_ns)
            self._staging = Staging(self.spec, inner.views, self._copies)
        except BaseException:
            inner.abort()  # else the others would wait for this rank
            inner.close()
            raise
        self.combine_dtype = inner.combine_dtype

    # -- the Protocol ---------------------------------------------------------------------------------

    def dispatch_send(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> PendingDispatch:
        """As the Protocol says. Waits for the caller's stream; then tensors may be overwritten."""
        spec, tokens = self.spec, len(x) if x.dim() == 2 else -1
        check_tensor_on(self.device, "x", x, self.combine_dtype, T=tokens, H=spec.hidden)
        if tokens > spec.max_tokens:
            raise InvalidArgument("x", f"T = {tokens}", f"at most max_tokens = {spec.max_tokens} tokens")
        check_tensor_on(self.device, "topk_ids", topk_ids, torch.int64, T=tokens, K=spec.top_k)
        staged_x, staged_ids = self._staging.x[:tokens], self._staging.ids[:tokens]
        pairs, weights = [(staged_x, x), (staged_ids, topk_ids)], None
        if topk_weights is not None:
            weights = self._check_weights(topk_weights, tokens)
            pairs.append((weights, topk_weights))
        self._copies.fetch(*pairs)
        return PendingDispatch(self, self.inner.dispatch_send(staged_x, staged_ids, weights), tokens)

    def combine_send(
        self,
        expert_out: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        *,
        reduction: Reduction | None = None,
    ) -> PendingCombine:
        """As the Protocol says. Waits for the caller's stream; then tensors may be overwritten.

        Args:
            reduction: see NativeExchange.combine_send.
        """
        handle = received.handle
        if not isinstance(handle, Handle) or handle.owner is not self:
            raise InvalidArgument("received.handle", handle, "of a dispatch of this exchange")
        rows = self._answers(expert_out, received, handle.order)
        staged = self._staging.answers[: len(rows)]
        pairs, weights = [(staged, rows)], None
        if topk_weights is not None:
            weights = self._check_weights(topk_weights, handle.tokens)
            pairs.append((weights, topk_weights))
        self._copies.fetch(*pairs)
        inner = self.inner.combine_send(staged, handle.inner, weights, reduction=reduction)
        return PendingCombine(self, inner, handle.tokens)

    def all_gather(self, record: bytes) -> list[bytes]:
        """As the Protocol says."""
        return self.inner.all_gather(record)

    def barrier(self) -> None:
        """As the Protocol says: of the processes, not of their streams."""
        self.inner.barrier()

    def close(self) -> None:
        """As the Protocol says. Copies on their way to the device end first."""
        self._staging.drain(self._copies)
        self.inner.close()

    def statistics(self) -> dict[str, Any]:
        """Of the inner exchange."""
        return self.inner.statistics()

    def release(self, received: Received) -> None:
        """Without effect: what a view shows is a copy, its bank was given back when it was received."""

    @property
    def staging_bytes(self) -> int:
        """Host memory of the staging, in bytes; pinned where the device is a GPU."""
        return self._staging.bytes

    # -- between the halves and the device ------------------------------------------------------------

    def land(self, inner: Received, tokens: int, view: View) -> Received:
        """What the inner exchange received in place, on the device in this view; gives the bank back."""
        landing = self._staging.landing()
        self._copies.reuse(landing.slot)
        delivery = self._copies.delivery(landing.slot)
        order, made = landing.bring(inner, delivery, whole=view is View.INDEX)
        delivery.finish()
        self.inner.release(inner)
        if view is View.COMPACT:
            made = [order.spread(each) for each in made]
        elif view is View.PADDED:
            made = [order.pad(each, like) for each, like in zip(made, self._padded(made), strict=True)]
        rows, scales = made[0], made[1] if len(made) > 1 else None
        ids = order.entry if view is View.INDEX else None
        handle = Handle(inner, order, tokens, self)
        return Received(rows, order.counts, order.offsets, handle, view, scales, ids)

    def _padded(self, made: list[torch.Tensor]) -> list[torch.Tensor]:
        """Rows of all experts; of scales the tokens are in one piece, as grouped GEMMs read them."""
        shape = (len(self.spec.local_experts), self._staging.region_rows)
        rows = made[0].new_empty((*shape, self.spec.hidden))
        return [
            rows,
            *(each.new_empty((shape[0], each.shape[1], shape[1])).transpose(1, 2) for each in made[1:]),
        ]

    def _answers(self, expert_out: torch.Tensor, received: Received, order: Order) -> torch.Tensor:
        """[N, H] on the device. Raises InvalidArgument where expert_out has not the layout of `received`."""
        hidden, dtype, name = self.spec.hidden, self.combine_dtype, "expert_out"
        if received.view is not View.PADDED:
            check_tensor_on(self.device, name, expert_out, dtype, N=len(order.entry), H=hidden)
            return expert_out
        sizes = {"E_local": len(order.counts), "R*max_tokens": self._staging.region_rows}
        check_tensor_on(self.device, name, expert_out, dtype, **sizes, H=hidden)
        return order.gather(expert_out)

    def _check_weights(self, weights: torch.Tensor, tokens: int) -> torch.Tensor:
        """Staging for them, once they are what they must be."""
        check_tensor_on(self.device, "topk_weights", weights, torch.float32, T=tokens, K=self.spec.top_k)
        return self._staging.weights[:tokens]

    def bring_home(self, inner: native.PendingCombine, tokens: int, out: torch.Tensor | None) -> torch.Tensor:
        """The sums of a combine, on the device."""
        if out is not None:
            check_tensor_on(self.device, "out", out, self.combine_dtype, T=tokens, H=self.spec.hidden)
        home = self._staging.home()
        self._copies.reuse(home.slot)
        staged = inner.recv(home.rows[:tokens])
        delivery = self._copies.delivery(home.slot, into=out)
        if out is None:
            out = delivery.empty((tokens, self.spec.hidden), self.combine_dtype)
        delivery.copy(out, staged)
        delivery.finish()
        return out


def from_process_group(
    group: Any,
    spec: ExchangeSpec,
    device: torch.device | str | int,
    options: FabricOptions | None = None,
    waiting: Waiting | None = None,
    share: HostShare | None = None,
) -> BounceExchange:
    """fabric_bootstrap.from_process_group for tensors of `device`. Collective."""
    return _behind(fabric_bootstrap.from_process_group(group, spec, options, waiting, share), device)


def from_store(
    store: Store,
    name: str,
    spec: ExchangeSpec,
    device: torch.device | str | int,
    options: FabricOptions | None = None,
    waiting: Waiting | None = None,
    share: HostShare | None = None,
) -> BounceExchange:
    """fabric_bootstrap.from_store for tensors of `device`. Collective."""
    return _behind(fabric_bootstrap.from_store(store, name, spec, options, waiting, share), device)


def _behind(inner: NativeExchange, device: torch.device | str | int) -> BounceExchange:
    """Returns once every rank has its device and staging. Raises on all ranks if one has not."""
    exchange = BounceExchange(inner, device)
    exchange.barrier()
    return exchange
