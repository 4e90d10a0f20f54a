"""[7] [8] A sparse block on a GPU: route, dispatch, grouped experts, combine, with a yield at each hook.

The rows that come are counted on the device: nothing waits for the host, so it can be captured.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ep_server.ep.exchange import PendingCombine, Received
from ep_server.model.families.spec import RouterSpec
from ep_server.model.gpu.rows import Arrival, Rows, Tokens
from ep_server.model.layers import MoeWeights
from ep_server.model.moe import wire_dtype
from ep_server.model.torch_compute import TorchGatedFfn
from ep_server.model.triton.activation import silu_mul
from ep_server.model.triton.expert_rows import ExpertRows, ExpertWeights
from ep_server.model.triton.experts import run_experts
from ep_server.model.triton.router import Drawn, route


@dataclass(frozen=True, slots=True)
class GpuMoe:
    """What a sparse block shares with those of the other layers, and its number.

    logits: [E, H], the router's weight. expert_tokens: [E_local] int32, += rows received.
    seed: of experts drawn at random, None where the router chooses.
    """

    layer: int
    router: RouterSpec
    logits: torch.Tensor
    rows: Rows
    expert_tokens: torch.Tensor
    seed: int | None = None

    def rows_per_expert(self, most: int) -> int:
        """On average, where every rank has `most` rows."""
        choices = most * self.rows.exchange.spec.num_ranks * self.router.top_k
        return -(-choices // self.router.num_experts)


@dataclass(frozen=True, slots=True)
class MoeStep:
    """live: [1] rows that are no padding. numbers, positions: [T] int32, of each row's request and in it.

    most: rows that the step has at most on any rank. whole: nothing else is done while rows travel.
    """

    live: torch.Tensor
    numbers: torch.Tensor
    positions: torch.Tensor
    most: int
    whole: bool = True


def moe(x: torch.Tensor, w: MoeWeights, on: GpuMoe, step: MoeStep) -> Generator[None, None, torch.Tensor]:
    """Sparse FFN of x: [T, H], normed, to [T, H]. Yields at both hooks. Padded rows go nowhere."""
    wire, arrival = wire_dtype(on.rows.exchange.spec.payload), Arrival(step.most, on.expert_tokens)
    tokens = Tokens(x.to(wire), *chosen(x, w, on, step))
    if step.whole:
        received = on.rows.dispatch(tokens, arrival)
    else:
        sent = on.rows.send(tokens)
        yield
        received = on.rows.receive(sent, arrival)
    outputs = grouped(received, w.experts, on.rows_per_expert(step.most)).to(wire)
    pending: PendingCombine | None = None
    if w.shared is not None or not step.whole:
        pending = on.rows.answer(outputs, received)
    shared = None if w.shared is None else dense(x, w.shared)  # while the combine is in flight
    if not step.whole:
        yield
    routed = (on.rows.combine(outputs, received) if pending is None else pending.recv()).to(x.dtype)
    return routed if shared is None else routed + shared


def chosen(x: torch.Tensor, w: MoeWeights, on: GpuMoe, step: MoeStep) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids [T, K] int64, -1 for padded rows, and their weights [T, K] float32."""
    ids = torch.empty(len(x), on.router.top_k, dtype=torch.int64, device=x.device)
    gates = torch.empty(len(x), on.router.top_k, dtype=torch.float32, device=x.device)
    drawn = None if on.seed is None else Drawn(step.numbers, step.positions, on.seed, on.layer)
    route(router_logits(x, on.logits), w.bias, on.router, ids, gates, step.live, drawn)
    return ids, gates


def router_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """weight: [E, H] float32, in `dtype` where that holds it exactly: products then are the same."""
    narrow = weight.to(dtype)
    return narrow if weight.is_cuda and torch.equal(narrow.float(), weight) else weight


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[T, E] float32: sums of float32, whatever is multiplied."""
    if weight.dtype is torch.float32:
        return F.linear(x.float(), weight)
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


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
