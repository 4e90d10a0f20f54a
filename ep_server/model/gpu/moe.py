"""[7] [8] A sparse block on a GPU: route, dispatch, grouped experts, combine, with a yield at each hook.

The rows that come are counted on the device: nothing waits for the host, so it can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ep_server.ep.exchange import Exchange, PendingDispatch, Received
from ep_server.model.experts import received_rows
from ep_server.model.families.spec import RouterSpec
from ep_server.model.layers import MoeWeights
from ep_server.model.moe import wire_dtype
from ep_server.model.router import route
from ep_server.model.torch_compute import TorchGatedFfn
from ep_server.model.uniform import UniformRouting

NOWHERE = -1  # expert id of a padded row


@dataclass(frozen=True, slots=True)
class GpuMoe:
    """What a sparse block shares with those of the other layers, and its number.

    receive: the second half of a dispatch, given the rows that the step has at most on any rank.
    expert_tokens: [E_local] int64, rows received so far.
    """

    layer: int
    router: RouterSpec
    exchange: Exchange
    receive: Callable[[PendingDispatch, int], Received]
    expert_tokens: torch.Tensor
    uniform: UniformRouting | None = None


@dataclass(frozen=True, slots=True)
class MoeStep:
    """slots: [T], negative for a padded row. tokens: [T] of UniformRouting.identify, or None. most: see
    GpuMoe.receive."""

    slots: torch.Tensor
    tokens: torch.Tensor | None
    most: int


def moe(x: torch.Tensor, w: MoeWeights, on: GpuMoe, step: MoeStep) -> Generator[None, None, torch.Tensor]:
    """Sparse FFN of x: [T, H], normed; yields twice and returns [T, H]. Padded rows go nowhere."""
    ids, gates = route(x, w, on.router)
    if on.uniform is not None and step.tokens is not None:
        ids = on.uniform.draw(step.tokens, on.layer)
    ids = torch.where(step.slots[:, None] < 0, NOWHERE, ids)
    wire = wire_dtype(on.exchange.spec.payload)
    dispatched = on.exchange.dispatch_send(x.to(wire), ids, gates)
    yield
    received = on.receive(dispatched, step.most)
    outputs = w.experts(received_rows(received, x.dtype), received.offsets)
    on.expert_tokens.add_(received.counts)
    combined = on.exchange.combine_send(outputs.to(wire), received)
    shared = None if w.shared is None else dense(x, w.shared)  # while the combine is in flight
    yield
    routed = combined.recv().to(x.dtype)
    return routed if shared is None else routed + shared


def dense(x: torch.Tensor, ffn: object) -> torch.Tensor:
    """The one gated FFN of `ffn` on all rows of x: [T, H]; library products."""
    assert isinstance(ffn, TorchGatedFfn)
    gate, up = F.linear(x, ffn.gate_up[0]).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, ffn.down[0])
