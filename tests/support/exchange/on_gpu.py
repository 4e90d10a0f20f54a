"""NvlinkExchange behind CPU tensors, so that the conformance suite judges it like every other implementation.

Copies of the arguments are overwritten as soon as their kernel is enqueued, outputs are poisoned before.
"""

from __future__ import annotations

import torch

from ep_server.exchange.api import PendingCombine, PendingDispatch, Received, View
from ep_server.exchange.nvlink.exchange import NvlinkExchange


def to_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same values and strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda").copy_(tensor)


def poison(*tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.fill_(torch.nan if tensor.dtype.is_floating_point else -1)


def to_cpu(received: Received) -> Received:
    scales = received.scales
    if scales is not None:
        scales = scales.transpose(-2, -1).contiguous().cpu().transpose(-2, -1)
        scales = scales.contiguous() if received.view is not View.PADDED else scales
    return Received(
        rows=received.rows.cpu(),
        counts=received.counts.cpu(),
        offsets=received.offsets.cpu(),
        handle=received,
        view=received.view,
        scales=scales,
        row_ids=None if received.row_ids is None else received.row_ids.cpu(),
    )


class Dispatch:
    def __init__(self, pending: PendingDispatch | Later, exchange: NvlinkExchange, most: int | None) -> None:
        self.pending, self.exchange, self.most = pending, exchange, most

    def recv(self, view: View = View.COMPACT) -> Received:
        out = None
        if view is View.PADDED:
            out = self.exchange.empty_padded()
            out[0].view(torch.uint8).fill_(0xFF)
            poison(out[1])
        received = self.pending.recv(view, out=out, most_tokens=self.most)
        self.exchange.synchronize()
        return to_cpu(received)


class Combine:
    def __init__(self, pending: PendingCombine, exchange: NvlinkExchange) -> None:
        self.pending, self.exchange = pending, exchange

    def recv(self, out: torch.Tensor | None = None) -> torch.Tensor:
        given = None if out is None else to_gpu(out)
        result = self.pending.recv(given)
        self.exchange.synchronize()
        return result.cpu() if out is None else out.copy_(result)


class OnGpu:
    """The Protocol over a NvlinkExchange; `fused` runs both halves in one kernel, at the second call."""

    def __init__(
        self, exchange: NvlinkExchange, *, fused: bool = False, most_tokens: int | None = None
    ) -> None:
        self.exchange, self.spec, self.fused, self.most = exchange, exchange.spec, fused, most_tokens
        self.all_gather, self.barrier, self.close = exchange.all_gather, exchange.barrier, exchange.close
        self.capabilities = exchange.capabilities

    def dispatch_send(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> Dispatch:
        given = (to_gpu(x), to_gpu(topk_ids), None if topk_weights is None else to_gpu(topk_weights))
        if self.fused:
            return Dispatch(Later(self.exchange, given), self.exchange, self.most)
        pending = self.exchange.dispatch_send(*given)
        poison(*given)
        return Dispatch(pending, self.exchange, self.most)

    def combine_send(
        self, expert_out: torch.Tensor, received: Received, topk_weights: torch.Tensor | None = None
    ) -> Combine:
        original = received.handle
        assert isinstance(original, Received)
        given, weights = to_gpu(expert_out), None if topk_weights is None else to_gpu(topk_weights)
        if self.fused:
            return Combine(LaterCombine(self.exchange, given, original, weights), self.exchange)
        pending = self.exchange.combine_send(given, original, weights)
        poison(given)
        return Combine(pending, self.exchange)


class Later:
    """A dispatch that waits for its second half to be asked for."""

    def __init__(self, exchange: NvlinkExchange, given: tuple[torch.Tensor, ...]) -> None:
        self.exchange, self.given = exchange, given

    def recv(self, view: View, *, out: tuple[torch.Tensor, ...] | None, most_tokens: int | None) -> Received:
        received = self.exchange.dispatch(*self.given, view, out=out, most_tokens=most_tokens)
        poison(*self.given)
        return received


class LaterCombine:
    def __init__(self, exchange: NvlinkExchange, *given: object) -> None:
        self.exchange, self.given = exchange, given

    def recv(self, out: torch.Tensor | None = None) -> torch.Tensor:
        result = self.exchange.combine(*self.given, out=out)
        poison(self.given[0])
        return result
