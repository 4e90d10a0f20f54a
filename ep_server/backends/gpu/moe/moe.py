"""[7] [8] A sparse block on a GPU: route, dispatch, experts, combine, with a yield at each hook.

Row counts stay on the device and nothing waits for the host, so the block can be captured in a graph. Weights
are those of models/layers.py, prepared by TorchCompute.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from ep_server.backends.gpu.kernels.hopper.experts import HopperExperts, hopper_fits
from ep_server.backends.gpu.kernels.hopper.products import HopperProduct, product
from ep_server.backends.gpu.kernels.triton.expert_rows import ExpertRows, ExpertWeights
from ep_server.backends.gpu.kernels.triton.experts import run_experts, silu_mul
from ep_server.backends.gpu.kernels.triton.local_rows import ExpertOutputs, add_outputs_norm
from ep_server.backends.gpu.kernels.triton.norm import add_rms_norm
from ep_server.backends.gpu.kernels.triton.partial import Partial
from ep_server.backends.gpu.kernels.triton.router import Choice, Drawn, route
from ep_server.backends.gpu.moe.rows import Arrival, DeferredCombine, Rows, Tokens
from ep_server.backends.gpu.side_stream import Hook, SideStream
from ep_server.backends.gpu.step_input import StepTensors
from ep_server.backends.torch_compute import TorchGatedFfn
from ep_server.exchange.api import AddNorm, ExchangeSpec, Received
from ep_server.models.families.spec import RouterSpec
from ep_server.models.layers import MoeWeights
from ep_server.models.moe import UniformRouting, wire_dtype
from ep_server.models.timers import Lap, Phase


@dataclass(frozen=True, slots=True)
class GpuRouter:
    """The router of a layer.

    layer: its number. weight: [E, H], see router_weight(). bias: [E] float32, see MoeWeights.
    hopper: the Hopper kernel for few rows; None if there is none.
    routing: for experts drawn at random; None if the router chooses.
    slots: [W, E] of models.slots.SlotTable; None where the exchange numbers experts as the router does.
    """

    layer: int
    spec: RouterSpec
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    hopper: HopperProduct | None = None
    routing: UniformRouting | None = None
    slots: torch.Tensor | None = None

    def choose(self, x: torch.Tensor, step: StepTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Of x: [T, H], normed: ids [T, K] int64 of the exchange, -1 for padding; weights [T, K] float32."""
        ids = torch.empty(len(x), self.spec.top_k, dtype=torch.int64, device=x.device)
        gates = torch.empty(len(x), self.spec.top_k, dtype=torch.float32, device=x.device)
        drawn = None
        if self.routing is not None:
            seed, exponent = self.routing.seed, self.routing.exponent
            drawn = Drawn(step.numbers, step.positions, seed, self.layer, exponent)
        logits = product(x, self.hopper, self._logits)
        route(logits, Choice(self.spec, ids, gates, self.bias, step.live, drawn, self.slots))
        return ids, gates

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """[T, E] float32: sums in float32, for any dtype of the factors."""
        if self.weight.dtype is torch.float32:
            return F.linear(x.float(), self.weight)
        return torch.mm(x, self.weight.t(), out_dtype=torch.float32)


def router_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """weight: [E, H] float32; converted to `dtype` if that is exact, so that products do not change."""
    narrow = weight.to(dtype)
    return narrow if weight.is_cuda and torch.equal(narrow.float(), weight) else weight


def hopper_experts(ffn: object) -> HopperExperts | None:
    """The Hopper kernel, if it supports these weights and their device."""
    weights = _weights_of(ffn)
    return HopperExperts(weights) if hopper_fits(weights) else None


def grouped(received: Received, ffn: object, each: int, hopper: HopperExperts | None = None) -> torch.Tensor:
    """Runs every local expert on its rows. each: expected rows per expert.

    Returns: [N, H] or [E_local, P, H], as combine_send takes it.
    """
    weights = _weights_of(ffn)
    given, down = ExpertRows.of(received), weights.down
    dtype = torch.bfloat16 if weights.fp8 else down.dtype
    rows = given.rows.shape[:2] if given.padded else [given.most]
    out = down.new_empty(*rows, down.shape[1], dtype=dtype)
    if hopper is not None and hopper.takes(given, each):
        scratch = down.new_empty(hopper.scratch_bytes(given.most), dtype=torch.uint8)
        hopper.run(given, scratch, out, rows_per_expert=each)
    else:
        hidden = down.new_empty(given.most, down.shape[2], dtype=dtype)
        run_experts(given, weights, hidden, out, rows_per_expert=each)
    return out


def dense(x: torch.Tensor, ffn: object) -> torch.Tensor:
    """Runs the single gated FFN of `ffn` on all rows of x: [T, H], with library products."""
    assert isinstance(ffn, TorchGatedFfn)
    hidden = x.new_empty(len(x), ffn.down.shape[2])
    silu_mul(F.linear(x, ffn.gate_up[0]), hidden)
    return F.linear(hidden, ffn.down[0])


def _weights_of(ffn: object) -> ExpertWeights:
    """The weights in the form of the grouped products."""
    assert isinstance(ffn, TorchGatedFfn)
    return ExpertWeights(ffn.gate_up, ffn.down, *(ffn.scales or (None, None)))


@dataclass(frozen=True, slots=True)
class Both:
    """The sum of two branches, rounded. routed, shared: [T, H] of the stream's dtype, contiguous."""

    routed: torch.Tensor
    shared: torch.Tensor


# Added to the residual stream: [T, H], or the terms of its sum.
Branch = torch.Tensor | Partial | ExpertOutputs | DeferredCombine | Both


def add_norm(branch: Branch, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds a branch to the residual stream, [T, H]. Returns the sum normed, maybe in place of the branch.

    Args:
        weight: [H], of the norm.
    """
    if isinstance(branch, DeferredCombine):
        norm = AddNorm(residual, weight, eps, branch.shared)
        if branch.exchange.can_norm(norm):
            return branch.run(norm)
        routed, shared = branch.run().to(residual.dtype), branch.shared
        branch = routed if shared is None else Both(routed, shared)
    if isinstance(branch, ExpertOutputs):
        out = torch.empty_like(residual)
        add_outputs_norm(branch, residual, weight, eps, out)
    elif isinstance(branch, Both):
        out = branch.routed
        add_rms_norm(branch.routed, residual, weight, eps, out, branch.shared)
    else:
        out = torch.empty_like(residual) if isinstance(branch, Partial) else branch
        add_rms_norm(branch, residual, weight, eps, out)
    return out


MOST_SIDE_ROWS = 256  # rows of shared experts on a branch; products of more rows fill the device


@dataclass(frozen=True, slots=True)
class GpuMoe:
    """The parts of a layer's sparse block.

    exchange: what the ranks agree on. expert_tokens: [E_local] int32, += rows received.
    hopper: one kernel for all experts, for the rows that it supports; None if there is none.
    """

    router: GpuRouter
    exchange: ExchangeSpec
    expert_tokens: torch.Tensor
    hopper: HopperExperts | None = None

    def rows_per_expert(self, most: int) -> int:
        """The mean number of rows per expert if every rank has `most` rows."""
        choices = most * self.exchange.num_ranks * self.router.spec.top_k
        return -(-choices // self.router.spec.num_experts)


@dataclass(frozen=True, slots=True)
class MoeStep:
    """The state that the sparse blocks of a micro-batch share. most, rows, lap, side: see decoder.Pass."""

    step: StepTensors
    most: int
    rows: Rows
    lap: Lap
    side: SideStream | None = None


class _Shared:
    """The output of shared experts, if there are any: on a branch, else on the stream of the step.

    The branch waits only for x. It may occupy multiprocessors that other kernels need whose blocks wait for
    each other (csrc/kernels/hopper/experts) or for peers (csrc/exchange/nvlink). That only delays them,
    because the branch never waits for them.
    """

    def __init__(self, x: torch.Tensor, w: MoeWeights, at: MoeStep) -> None:
        """Forks the branch after the work that made x, and before all work of this block."""
        self._work = None if w.shared is None else partial(dense, x, w.shared)
        side = at.side if w.shared is not None and 0 < len(x) <= MOST_SIDE_ROWS else None
        self._lap, self._fork = at.lap, None if side is None else side.fork()
        self._hook: Hook[torch.Tensor] | None = None

    def run_on_side(self) -> None:
        """Runs the branch. Call it after the dispatch: the first work after a fork stays in the queue of x.

        That first work is then the router, which may be set up early.
        """
        if self._work is not None and self._fork is not None:
            self._hook = self._fork.run(self._work)

    def run_here(self) -> None:
        """Runs shared experts while the combine is in flight, unless they run on the branch."""
        if self._work is not None and self._fork is None:
            self._lap(Phase.COMBINE)
            out = self._work()
            self._lap(Phase.EXPERTS)
            self._hook = lambda: out

    def sums(self) -> torch.Tensor | None:
        """The output, [T, H], which the current stream may now read."""
        return None if self._hook is None else self._hook()


def moe(x: torch.Tensor, w: MoeWeights, on: GpuMoe, at: MoeStep) -> Generator[None, None, Branch]:
    """Sparse FFN of x: [T, H], normed. Yields before both hooks. Padded rows are not sent."""
    wire, lap, shared = wire_dtype(on.exchange.payload), at.lap, _Shared(x, w, at)
    tokens = Tokens(x.to(wire), *on.router.choose(x, at.step))
    lap(Phase.ROUTER)
    each = on.rows_per_expert(at.most)
    ahead = on.hopper is not None and wire is torch.bfloat16 and on.hopper.reads_ahead(each)
    arrive = at.rows.dispatch(tokens, Arrival(at.most, on.expert_tokens, ahead))
    shared.run_on_side()
    yield
    received = arrive()
    lap(Phase.DISPATCH)
    outputs = grouped(received, w.experts, each, on.hopper).to(wire)
    lap(Phase.EXPERTS)
    combined = at.rows.combine(outputs, received)
    shared.run_here()
    yield
    came, added = combined(), shared.sums()
    if not isinstance(came, DeferredCombine):  # whose time counts for add_norm
        lap(Phase.COMBINE)
    if isinstance(came, DeferredCombine | ExpertOutputs):
        return replace(came, shared=added)
    routed = came.to(x.dtype)
    return routed if added is None else Both(routed, added)
