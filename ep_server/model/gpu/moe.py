"""[7] [8] A sparse block on a GPU: route, dispatch, grouped experts, combine, with a yield at each hook.

The rows that come are counted on the device: nothing waits for the host, so it can be captured.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from ep_server.ep.exchange import AddNorm, ExchangeSpec, Received
from ep_server.model.families.spec import RouterSpec
from ep_server.model.gpu.rows import Arrival, Rows, Tokens, Unsent
from ep_server.model.gpu.streamed_experts import StreamedExperts, reads_ahead, streamable
from ep_server.model.gpu.streamed_products import StreamedProduct, product
from ep_server.model.layers import MoeWeights
from ep_server.model.moe import wire_dtype
from ep_server.model.timers import Lap, Phase
from ep_server.model.torch_compute import TorchGatedFfn
from ep_server.model.triton.activation import silu_mul
from ep_server.model.triton.expert_rows import ExpertRows, ExpertWeights
from ep_server.model.triton.experts import run_experts
from ep_server.model.triton.local_rows import Answers, add_answers_norm
from ep_server.model.triton.norm import add_rms_norm
from ep_server.model.triton.partial import Partial
from ep_server.model.triton.router import Choice, Drawn, route


@dataclass(frozen=True, slots=True)
class GpuMoe:
    """What a sparse block shares with those of the other layers, and its number.

    exchange: what the ranks agree on. logits: [E, H], the router's weight.
    expert_tokens: [E_local] int32, += rows received.
    streamed: the experts in one kernel, for rows that it takes; None where there is none.
    streamed_logits: the same of the router's product.
    seed: of experts drawn at random, None where the router chooses.
    """

    layer: int
    router: RouterSpec
    exchange: ExchangeSpec
    logits: torch.Tensor
    expert_tokens: torch.Tensor
    streamed: StreamedExperts | None = None
    streamed_logits: StreamedProduct | None = None
    seed: int | None = None

    def rows_per_expert(self, most: int) -> int:
        """On average, where every rank has `most` rows."""
        choices = most * self.exchange.num_ranks * self.router.top_k
        return -(-choices // self.router.num_experts)


@dataclass(frozen=True, slots=True)
class MoeStep:
    """What the sparse blocks of a micro-batch share.

    live: [1] rows that are no padding. numbers, positions: [T] int32, of each row's request and in it.
    most, rows, lap: see decoder.Pass.
    """

    live: torch.Tensor
    numbers: torch.Tensor
    positions: torch.Tensor
    most: int
    rows: Rows
    lap: Lap


@dataclass(frozen=True, slots=True)
class Both:
    """The sum of two branches, rounded. routed, shared: [T, H] of the stream's dtype, contiguous."""

    routed: torch.Tensor
    shared: torch.Tensor


Branch = (
    torch.Tensor | Partial | Answers | Unsent | Both
)  # added to the residual stream: [T, H], or what it is a sum of


def moe(x: torch.Tensor, w: MoeWeights, on: GpuMoe, step: MoeStep) -> Generator[None, None, Branch]:
    """Sparse FFN of x: [T, H], normed. Yields before both hooks. Padded rows go nowhere."""
    wire, lap = wire_dtype(on.exchange.payload), step.lap
    tokens = Tokens(x.to(wire), *chosen(x, w, on, step))
    lap(Phase.ROUTER)
    each = on.rows_per_expert(step.most)
    ahead = on.streamed is not None and wire is torch.bfloat16 and reads_ahead(each)
    arrive = step.rows.dispatch(tokens, Arrival(step.most, on.expert_tokens, ahead))
    yield
    received = arrive()
    lap(Phase.DISPATCH)
    outputs = grouped(received, w.experts, each, on.streamed).to(wire)
    lap(Phase.EXPERTS)
    combined = step.rows.combine(outputs, received)
    shared = None
    if w.shared is not None:  # while the combine is in flight
        lap(Phase.COMBINE)
        shared = dense(x, w.shared)
        lap(Phase.EXPERTS)
    yield
    came = combined()
    if isinstance(came, Unsent):  # its time is that of add_norm
        return replace(came, shared=shared)
    lap(Phase.COMBINE)
    if isinstance(came, Answers):
        return replace(came, shared=shared)
    routed = came.to(x.dtype)
    return routed if shared is None else Both(routed, shared)


def chosen(x: torch.Tensor, w: MoeWeights, on: GpuMoe, step: MoeStep) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids [T, K] int64, -1 for padded rows, and their weights [T, K] float32."""
    ids = torch.empty(len(x), on.router.top_k, dtype=torch.int64, device=x.device)
    gates = torch.empty(len(x), on.router.top_k, dtype=torch.float32, device=x.device)
    drawn = None if on.seed is None else Drawn(step.numbers, step.positions, on.seed, on.layer)
    logits = product(x, on.streamed_logits, lambda rows: router_logits(rows, on.logits))
    route(logits, Choice(on.router, ids, gates, w.bias, step.live, drawn))
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


def add_norm(branch: Branch, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds a branch to the residual stream, [T, H]. Returns the sum normed, maybe in place of it."""
    if isinstance(branch, Unsent):
        norm = AddNorm(residual, weight, eps, branch.shared)
        if branch.exchange.can_norm(norm):
            return branch.run(norm)
        routed, shared = branch.run().to(residual.dtype), branch.shared
        branch = routed if shared is None else Both(routed, shared)
    if isinstance(branch, Answers):
        out = torch.empty_like(residual)
        add_answers_norm(branch, residual, weight, eps, out)
    elif isinstance(branch, Both):
        out = branch.routed
        add_rms_norm(branch.routed, residual, weight, eps, out, branch.shared)
    else:
        out = torch.empty_like(residual) if isinstance(branch, Partial) else branch
        add_rms_norm(branch, residual, weight, eps, out)
    return out


def weights_of(ffn: TorchGatedFfn) -> ExpertWeights:
    """As the grouped products take them."""
    return ExpertWeights(ffn.gate_up, ffn.down, *(ffn.scales or (None, None)))


def streamed_experts(ffn: object) -> StreamedExperts | None:
    """The kernel for Hopper, where it is for these weights and their device."""
    assert isinstance(ffn, TorchGatedFfn)
    weights = weights_of(ffn)
    return StreamedExperts(weights) if streamable(weights) else None


def grouped(
    received: Received, ffn: object, each: int, streamed: StreamedExperts | None = None
) -> torch.Tensor:
    """Every local expert on the rows that came for it; counts stay on the device. each: rows to expect.

    Returns: [N, H] or [E_local, P, H], as combine_send takes it.
    """
    assert isinstance(ffn, TorchGatedFfn)
    weights = weights_of(ffn)
    given, dtype = ExpertRows.of(received), torch.bfloat16 if weights.fp8 else ffn.down.dtype
    hidden = ffn.down.new_empty(given.most, ffn.down.shape[2], dtype=dtype)
    rows = given.rows.shape[:2] if given.padded else [given.most]
    out = ffn.down.new_empty(*rows, ffn.down.shape[1], dtype=dtype)
    if streamed is not None and streamed.takes(given, each):
        streamed.run(given, hidden, out, rows_per_expert=each)
    else:
        run_experts(given, weights, hidden, out, rows_per_expert=each)
    return out


def dense(x: torch.Tensor, ffn: object) -> torch.Tensor:
    """The one gated FFN of `ffn` on all rows of x: [T, H]; library products."""
    assert isinstance(ffn, TorchGatedFfn)
    hidden = x.new_empty(len(x), ffn.down.shape[2])
    silu_mul(F.linear(x, ffn.gate_up[0]), hidden)
    return F.linear(hidden, ffn.down[0])
