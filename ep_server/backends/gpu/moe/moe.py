"""[7] [8] A sparse block on a GPU: route, dispatch, grouped experts, combine, with a yield at each hook.

The rows that come are counted on the device: nothing waits for the host, so it can be captured.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import partial

import torch

from ep_server.backends.gpu.kernels.hopper.experts import StreamedExperts
from ep_server.backends.gpu.kernels.triton.local_rows import Answers
from ep_server.backends.gpu.moe.experts import dense, grouped
from ep_server.backends.gpu.moe.residual import Both, Branch
from ep_server.backends.gpu.moe.router import GpuRouter
from ep_server.backends.gpu.moe.rows import Arrival, Hook, Rows, Tokens, Unsent
from ep_server.backends.gpu.side_stream import Beside
from ep_server.backends.gpu.step_input import StepTensors
from ep_server.exchange.api import ExchangeSpec
from ep_server.models.layers import MoeWeights
from ep_server.models.moe import wire_dtype
from ep_server.models.timers import Lap, Phase

MOST_BESIDE = 256  # rows of shared experts on a branch: products of more fill the device


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
    """What the sparse blocks of a micro-batch share. most, rows, lap, beside: see decoder.Pass."""

    step: StepTensors
    most: int
    rows: Rows
    lap: Lap
    beside: Beside | None = None


class _Shared:
    """What experts of all tokens add, if there are any: on a branch of the step, else in its own stream.

    The branch waits for x alone and ends by itself. Kernels whose blocks wait for each other
    (csrc/kernels/hopper/experts) or for peers (csrc/exchange/nvlink) may find multiprocessors taken by it,
    and are only late: it must never wait for them.
    """

    def __init__(self, x: torch.Tensor, w: MoeWeights, at: MoeStep) -> None:
        """The branch is behind what made x, and nothing of this block."""
        self._work = None if w.shared is None else partial(dense, x, w.shared)
        beside = at.beside if w.shared is not None and 0 < len(x) <= MOST_BESIDE else None
        self._lap, self._fork = at.lap, None if beside is None else beside.fork()
        self._hook: Hook[torch.Tensor] | None = None

    def run_beside(self) -> None:
        """Behind the dispatch: what a graph is given first behind a fork goes on in the queue of what made x.

        That is the router then, which may be set up early.
        """
        if self._work is not None and self._fork is not None:
            self._hook = self._fork.run(self._work)

    def run_here(self) -> None:
        """While the combine is in flight, if not beside."""
        if self._work is not None and self._fork is None:
            self._lap(Phase.COMBINE)
            out = self._work()
            self._lap(Phase.EXPERTS)
            self._hook = lambda: out

    def sums(self) -> torch.Tensor | None:
        """[T, H], which the current stream may read now."""
        return None if self._hook is None else self._hook()


def moe(x: torch.Tensor, w: MoeWeights, on: GpuMoe, at: MoeStep) -> Generator[None, None, Branch]:
    """Sparse FFN of x: [T, H], normed. Yields before both hooks. Padded rows go nowhere."""
    wire, lap, shared = wire_dtype(on.exchange.payload), at.lap, _Shared(x, w, at)
    tokens = Tokens(x.to(wire), *on.router.choose(x, at.step))
    lap(Phase.ROUTER)
    each = on.rows_per_expert(at.most)
    ahead = on.streamed is not None and wire is torch.bfloat16 and on.streamed.reads_ahead(each)
    arrive = at.rows.dispatch(tokens, Arrival(at.most, on.expert_tokens, ahead))
    shared.run_beside()
    yield
    received = arrive()
    lap(Phase.DISPATCH)
    outputs = grouped(received, w.experts, each, on.streamed).to(wire)
    lap(Phase.EXPERTS)
    combined = at.rows.combine(outputs, received)
    shared.run_here()
    yield
    came, added = combined(), shared.sums()
    if not isinstance(came, Unsent):  # whose time is that of add_norm
        lap(Phase.COMBINE)
    if isinstance(came, Unsent | Answers):
        return replace(came, shared=added)
    routed = came.to(x.dtype)
    return routed if added is None else Both(routed, added)
