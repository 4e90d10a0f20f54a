"""[7] How rows travel between the tokens of a step and the experts.

A transfer is started, and its hook is called one yield later. Two micro-batches share one exchange, so all
ranks must start transfers in the same order: the layer loop does. The ways there are: transfers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from ep_server.backends.gpu.kernels.triton.local_rows import Answers
from ep_server.exchange.api import AddNorm, ExchangeSpec, Received, View

T = TypeVar("T")
Hook = Callable[[], T]  # called once, on the stream that the transfer was started on


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a dispatch sends. x: [T, H] of the wire's dtype. ids: [T, K] int64. gates: [T, K] float32."""

    x: torch.Tensor
    ids: torch.Tensor
    gates: torch.Tensor


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a receive is told. most: rows that the micro-batch has at most on any rank.

    expert_tokens: [E_local] int32, += rows received.
    read_ahead: the experts' kernel reads weights before the rows are there, if it is the stream's next.
    """

    most: int
    expert_tokens: torch.Tensor
    read_ahead: bool = False


class BothHalves(Protocol):
    """What is needed of ep.cuda.NvlinkExchange, which says more of it."""

    spec: ExchangeSpec
    device: torch.device

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        view: View,
        *,
        capacity: int,
        expert_stats: torch.Tensor,
        most_tokens: int,
        next_reads_ahead: bool,
    ) -> Received:
        """Both halves in one kernel."""
        ...

    def combine(
        self,
        expert_out: torch.Tensor,
        received: Received,
        *,
        next_reads_ahead: bool,
        add_norm: AddNorm | None = None,
    ) -> torch.Tensor:
        """Both halves in one kernel."""
        ...

    def can_norm(self, norm: AddNorm) -> bool:
        """Whether combine takes this add_norm."""
        ...

    def bounded(self, num_sms: int) -> AbstractContextManager[None]:
        """What is enqueued inside fills at most so many multiprocessors."""
        ...


@dataclass(frozen=True, slots=True)
class Unsent:
    """A combine that begins where its sums are needed, with what is made of them in the same kernel.

    out: of the experts, in the layout of received. shared: [T, H], what experts of all tokens add, or None.
    """

    exchange: BothHalves
    out: torch.Tensor
    received: Received
    shared: torch.Tensor | None = None

    def run(self, norm: AddNorm | None = None) -> torch.Tensor:
        """[T, H]: the sums, without `shared`; with `norm` what that says. Once."""
        return self.exchange.combine(self.out, self.received, next_reads_ahead=True, add_norm=norm)


class Rows(Protocol):
    """The exchange of a device, as a sparse block uses it."""

    def dispatch(self, tokens: Tokens, arrival: Arrival) -> Hook[Received]:
        """Starts a dispatch."""
        ...

    def combine(self, out: torch.Tensor, received: Received) -> Hook[torch.Tensor | Answers | Unsent]:
        """Starts a combine, or lets who adds its sums do so. out: in received's layout.

        Returns: a hook that returns [T, H], or what that is the sum of.
        """
        ...


@dataclass(frozen=True, slots=True)
class RowsOfSteps:
    """How rows travel in steps of one micro-batch, and of two.

    check: raises what a kernel has found since: a replayed graph makes no call that would.
    """

    one: Rows
    two: Rows
    check: Callable[[], None] = lambda: None
