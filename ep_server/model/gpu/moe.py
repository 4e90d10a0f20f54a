"""[7] [8] A sparse block on a GPU: route, dispatch, grouped experts, combine, with a yield at each hook.

The rows that come are counted on the device: nothing waits for the host, so it can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ep_server.ep.exchange import Exchange, PendingDispatch, Received
from ep_server.model.families.spec import RouterSpec
from ep_server.model.layers import MoeWeights
from ep_server.model.moe import wire_dtype
from ep_server.model.torch_compute import TorchGatedFfn
from ep_server.model.triton.activation import silu_mul
from ep_server.model.triton.expert_rows import ExpertRows, ExpertWeights
from ep_server.model.triton.experts import run_experts
from ep_server.model.triton.router import route
from ep_server.model.uniform import UniformRouting


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

    def rows_per_expert(self, most: int) -> int:
        """On average, where every rank has `most` rows."""
        choices = most * self.exchange.spec.num_ranks * self.router.top_k
        return -(-choices // self.router.num_experts)


@dataclass(frozen=True, slots=True)
class MoeStep:
    """live: [1] rows that are no padding. tokens: [T] of UniformRouting.identify, or None. most: see
    GpuMoe.receive."""

    live: torch.Tensor
    tokens: torch.Tensor | None
    most: int


def moe(x: torch.Tensor, w: MoeWeights, on: GpuMoe, step: MoeStep) -> Generator[None, None, torch.Tensor]:
    """Sparse FFN of x: [T, H], normed; yields twice and returns [T, H]. Padded rows go nowhere."""
    ids = torch.empty(len(x), on.router.top_k, dtype=torch.int64, device=x.device)
    gates = torch.empty(len(x), on.router.top_k, dtype=torch.float32, device=x.device)
    route(F.linear(x.float(), w.router), w.bias, on.router, ids, gates, step.live)
    if on.uniform is not None and step.tokens is not None:
        ids = torch.where(ids < 0, ids, on.uniform.draw(step.tokens, on.layer))
    wire = wire_dtype(on.exchange.spec.payload)
    dispatched = on.exchange.dispatch_send(x.to(wire), ids, gates)
    yield
    received = on.receive(dispatched, step.most)
    outputs = grouped(received, w.experts, on.rows_per_expert(step.most))
    on.expert_tokens.add_(received.counts)
    combined = on.exchange.combine_send(outputs.to(wire), received)
    shared = None if w.shared is None else dense(x, w.shared)  # while the combine is in flight
    yield
    routed = combined.recv().to(x.dtype)
    return routed if shared is None else routed + shared


def grouped(received: Received, ffn: object, each: int) -> torch.Tensor:
    """Every local expert on the rows that came for it; counts stay on the device. each: rows to expect.

    Returns: [N, H] or [E_local, P, H], as combine_send takes it.
    """
    assert isinstance(ffn, TorchGatedFfn)
    weights, given = ExpertWeights(ffn.gate_up, ffn.down), ExpertRows.of(received)
    hidden = ffn.down.new_empty(given.most, ffn.down.shape[2])
    out = ffn.down.new_empty(*(given.rows.shape[:2] if given.padded else [given.most]), ffn.down.shape[1])
    run_experts(given, weights, hidden, out, rows_per_expert=each)
    return out


def dense(x: torch.Tensor, ffn: object) -> torch.Tensor:
    """The one gated FFN of `ffn` on all rows of x: [T, H]; library products."""
    assert isinstance(ffn, TorchGatedFfn)
    hidden = x.new_empty(len(x), ffn.down.shape[2])
    silu_mul(F.linear(x, ffn.gate_up[0]), hidden)
    return F.linear(hidden, ffn.down[0])
