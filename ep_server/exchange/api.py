"""The exchange of expert parallelism as a Protocol: dispatch tokens to expert owners, combine the results.

Implementations: `reference.ReferenceExchange` (torch.distributed, the oracle) and
`native.ShmExchange` (csrc). One conformance suite runs against each. This file knows no transport.

Shapes: R ranks; T <= max_tokens tokens on this rank; H hidden; K top_k; E physical experts, of which
E_local belong to this rank: the ascending ids e with placement[e] == rank.
Operations are collective: every rank calls the same sequence of halves, with T = 0 if it has no token.
At most `num_banks` dispatches may be between their send and the matching combine_recv.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the front plans groups from a spec, and has no torch
    import torch


class Payload(StrEnum):
    """What a dispatched row looks like on the wire."""

    FP32 = "fp32"  # CPU only
    BF16 = "bf16"
    FP8 = "fp8"  # e4m3, one float32 scale per 128 channels
    FP8_POW2 = "fp8_pow2"  # scales rounded up to a power of two
    FP8_UE8M0 = "fp8_ue8m0"  # power-of-two scales, 4 exponents packed into one int32; H % 512 == 0


class Reduction(StrEnum):
    """Where the K expert outputs of a token are summed (always FP32, in top-k order)."""

    RANK = "rank"  # each rank sums its own experts' outputs, weighted, and returns one row per token
    SOURCE = "source"  # one row per (token, k) returns; the source sums: bit-identical for every R


class View(StrEnum):
    """How received rows are laid out."""

    COMPACT = "compact"  # [N, H] rows ordered by (local expert, source rank, source token)
    PADDED = "padded"  # [E_local, R * max_tokens, H], counts[e] valid rows each, same order inside an expert
    # No copy: [R * max_tokens, H] region of deduplicated rows + row ids per (expert, entry); more rows, also
    # of other ranks, where those of a host share what came over a network.
    INDEX = "index"


@dataclass(frozen=True, slots=True)
class ExchangeSpec:
    """Everything that must agree on all ranks. `rank` alone differs.

    placement: [E] owner rank of each physical expert, any table with values in 0 .. R-1.
    combine rows travel as float32 where payload is FP32, as bfloat16 otherwise.
    timeout_ns: deadline of every wait. num_banks: a power of two >= 2.
    """

    rank: int
    num_ranks: int
    placement: tuple[int, ...]
    max_tokens: int
    hidden: int
    top_k: int
    payload: Payload = Payload.BF16
    reduction: Reduction = Reduction.RANK
    num_banks: int = 4
    timeout_ns: int = 10_000_000_000

    @property
    def num_experts(self) -> int:
        """E, over all ranks."""
        return len(self.placement)

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's experts, ascending; their order is the local numbering."""
        return tuple(e for e, r in enumerate(self.placement) if r == self.rank)


def control_spec(spec: ExchangeSpec) -> ExchangeSpec:
    """The host-memory exchange beside that of GPUs: votes, liveness and bootstrap, no rows."""
    return replace(
        spec,
        placement=tuple(range(spec.num_ranks)),
        max_tokens=1,
        hidden=1,
        top_k=1,
        payload=Payload.FP32,
        reduction=Reduction.RANK,
        num_banks=2,
    )


@dataclass(slots=True)
class Received:
    """Rows this rank received for its experts, after dispatch_recv.

    rows: see View; dtype float32 (FP32), bfloat16 (BF16) or float8_e4m3fn (FP8*).
    scales: FP8 only, float32 [N, H/128] (COMPACT) or column-major [E_local, R*max_tokens, H/128]
      (PADDED, strides as DeepEP: the token dimension is the contiguous one); UE8M0: int32 [.., H/512].
    counts: [E_local] int32, rows per local expert.
    offsets: [E_local + 1] int64, exclusive prefix sum of counts (COMPACT).
    row_ids: INDEX only, [N] int64 in COMPACT order: which row of `rows` each entry reads.
    handle: implementation state that combine_send needs; opaque. Valid until combine_recv.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    handle: object
    view: View = View.COMPACT
    scales: torch.Tensor | None = None
    row_ids: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class AddNorm:
    """What a combine on a GPU may make of its sums where they end a layer; all bfloat16, contiguous.

    Each rounded once: sum + shared; residual + that, which is stored; then the RMS norm of what is stored.

    residual: [T, H], becomes the sum. weight: [H]. shared: [T, H], experts of all tokens, or None.
    """

    residual: torch.Tensor
    weight: torch.Tensor
    eps: float
    shared: torch.Tensor | None = None


class PendingDispatch(Protocol):
    """A dispatch whose send half has run. Between the halves nothing is held."""

    def recv(self, view: View = View.COMPACT) -> Received:
        """Waits for the headers and rows of all unmasked peers. Call exactly once.

        Raises: PeerTimeout, GroupAborted, ProtocolViolation.
        """
        ...


class PendingCombine(Protocol):
    """A combine whose send half has run."""

    def recv(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Waits for all returning rows and reduces them.

        Args:
            out: [T, H] written in place when given; float32 (FP32) or bfloat16.
        Returns: [T, H], the weighted sum over k; a token whose ids are all -1 gives zeros.
        Raises: PeerTimeout, GroupAborted, ProtocolViolation.
        """
        ...


class Exchange(Protocol):
    """One rank's end of the exchange. One thread at a time may call it; calls release the GIL."""

    spec: ExchangeSpec

    def dispatch_send(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> PendingDispatch:
        """Sends every token once to each rank that owns at least one of its experts.

        Args:
            x: [T, H] float32 (payload FP32) or bfloat16, contiguous; quantised on the way for FP8*.
            topk_ids: [T, K] int64, -1 = unused choice. The ids of one token are distinct.
            topk_weights: [T, K] float32, or None where combine_send gets them (reduction SOURCE).
        Raises: InvalidArgument, HookNotCalled, PeerTimeout, GroupAborted.
        """
        ...

    def combine_send(
        self,
        expert_out: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
    ) -> PendingCombine:
        """Returns the experts' outputs to the tokens' sources.

        Args:
            expert_out: in the layout of `received` (COMPACT [N, H]; PADDED [E_local, R*max_tokens, H];
              INDEX takes COMPACT [N, H]), float32 (FP32) or bfloat16. Row i answers row i.
            topk_weights: [T, K] float32 of this rank's own tokens, where dispatch got None.
        """
        ...

    def all_gather(self, record: bytes) -> list[bytes]:
        """The vote: gathers one record of <= 64 bytes from every rank, in rank order.

        Has the deadline of all waits: ranks that may come at very different times call barrier() first.
        """
        ...

    def barrier(self) -> None:
        """Returns once every rank has called it; has no deadline as long as all live."""
        ...

    def close(self) -> None:
        """Frees segments and mappings; idempotent. Pending operations are dropped."""
        ...
