"""[7] [8] A sparse block on a GPU: route, dispatch, grouped experts, combine, with a yield at each hook.

The rows that come are counted on the device: nothing waits for the host, so it can be captured.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

import torch

from ep_server.ep.exchange import ExchangeSpec
from ep_server.model.gpu.experts import dense, grouped
from ep_server.model.gpu.residual import Both, Branch
from ep_server.model.gpu.router import GpuRouter
from ep_server.model.gpu.rows import Arrival, Rows, Tokens, Unsent
from ep_server.model.gpu.step_input import StepTensors
from ep_server.model.gpu.streamed_experts import StreamedExperts
from ep_server.model.layers import MoeWeights
from ep_server.model.moe import wire_dtype
from ep_server.model.timers import Lap, Phase
from ep_server.model.triton.local_rows import Answers


@dataclass(frozen=True, slots=True)
class GpuMoe:
    """The sparse block of a layer.

    exchange: what the ranks agree on. expert_tokens: [E_local] int32, += rows received.
    streamed: the experts in one kernel, for rows that it takes; None where there is none.
    """

    router: GpuRouter
    exchange: ExchangeSpec
    expert_tokens: torch.Tensor
    streamed: StreamedExperts | None = None

    def rows_per_expert(self, most: int) -> int:
        """On average, where every rank has `most` rows."""
        choices = most * self.exchange.num_ranks * self.router.spec.top_k
        return -(-choices // self.router.spec.num_experts)


@dataclass(frozen=True, slots=True)
class MoeStep:
    """What the sparse blocks of a micro-batch share. most, rows, lap: see decoder.Pass."""

    step: StepTensors
    most: int
    rows: Rows
    lap: Lap


def moe(x: torch.Tensor, w: MoeWeights, on: GpuMoe, at: MoeStep) -> Generator[None, None, Branch]:
    """Sparse FFN of x: [T, H], normed. Yields before both hooks. Padded rows go nowhere."""
    wire, lap = wire_dtype(on.exchange.payload), at.lap
    tokens = Tokens(x.to(wire), *on.router.choose(x, at.step))
    lap(Phase.ROUTER)
    each = on.rows_per_expert(at.most)
    ahead = on.streamed is not None and wire is torch.bfloat16 and on.streamed.reads_ahead(each)
    arrive = at.rows.dispatch(tokens, Arrival(at.most, on.expert_tokens, ahead))
    yield
    received = arrive()
    lap(Phase.DISPATCH)
    outputs = grouped(received, w.experts, each, on.streamed).to(wire)
    lap(Phase.EXPERTS)
    combined = at.rows.combine(outputs, received)
    shared = None
    if w.shared is not None:  # while the combine is in flight
        lap(Phase.COMBINE)
        shared = dense(x, w.shared)
        lap(Phase.EXPERTS)
    yield
    came = combined()
    if not isinstance(came, Unsent):  # whose time is that of add_norm
        lap(Phase.COMBINE)
    if isinstance(came, Unsent | Answers):
        return replace(came, shared=shared)
    routed = came.to(x.dtype)
    return routed if shared is None else Both(routed, shared)
