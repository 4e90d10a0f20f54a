"""The seam of expert parallelism: the Protocol of an exchange, which dispatches tokens and combines results.

`factory.open_exchange` chooses the transport: ShmExchange, NvlinkExchange, FabricExchange,
FabricDeviceExchange or HierarchicalExchange. `testing.reference_exchange` does the same with collectives.
One conformance suite runs on each. This file knows no transport.

Shapes: R ranks; T <= max_tokens tokens on this rank; H hidden; K top_k; E physical experts, of which
E_local belong to this rank: the ascending ids e with placement[e] == rank.
Operations are collective: every rank calls the same sequence of halves, with T = 0 if it has no token.
At most `num_banks` dispatches may be between their send and the matching combine_recv.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NotRequired, Protocol, TypedDict

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

    @property
    def local_only(self) -> bool:
        """Whether rows need not travel at all: one rank, and no rounding that the spec promises.

        FP8 rounds rows on the wire. Reduction source promises the same bits for any number of ranks.
        """
        plain = self.payload in (Payload.FP32, Payload.BF16)
        return self.num_ranks == 1 and plain and self.reduction is Reduction.RANK


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


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an exchange can do. Fixed once it is open.

    payloads, views: that its dispatches accept. cheapest_view: the view that copies least.
    graph_safe: all of its operations can be captured into a CUDA graph and replayed.
    micro_batches: dispatches that may be between their send and the matching combine_recv.
    memory_bytes: memory that this rank holds between operations, on the device of its tensors.
    """

    payloads: frozenset[Payload]
    views: frozenset[View]
    cheapest_view: View
    graph_safe: bool
    micro_batches: int
    memory_bytes: int


class ExchangeStatistics(TypedDict):
    """Cumulative measurements; durations in ns. See records.RankStatistics for the names.

    peer_wait_max_ns: the longest single wait for a peer, where the transport measures it.
    """

    histograms: dict[str, tuple[int, ...]]
    sums: dict[str, int]
    counters: dict[str, int]
    peer_wait_ns: dict[tuple[str, int], int]
    expert_tokens: dict[int, int]
    peer_wait_max_ns: NotRequired[dict[tuple[str, int], int]]


class Abortable(Protocol):
    """A group whose waits can be ended from any thread."""

    def abort(self) -> None:
        """Ends every wait of the group with GroupAborted until the group is reset."""
        ...


class Membership(Protocol):
    """Which ranks of a group take part. A transport has it where the group can lose a rank and go on."""

    @property
    def masked(self) -> frozenset[int]:
        """Ranks that this one neither writes to nor waits for."""
        ...

    def mask(self, ranks: Iterable[int]) -> None:
        """Stops talking to these ranks, also in a wait in progress in another thread. Local to this rank."""
        ...

    def reset(self, dead: Iterable[int] = ()) -> None:
        """Starts a new generation: no abort, no operation in flight, no mask except `dead`. Collective.

        All ranks outside `dead` call it with the same `dead`. Pending operations and views are dropped.
        """
        ...


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

    @property
    def capabilities(self) -> Capabilities:
        """What this exchange can do."""
        ...

    @property
    def membership(self) -> Membership | None:
        """Who takes part; None where the group ends as soon as it loses a rank."""
        ...

    @property
    def fused(self) -> FusedExchange | None:
        """This exchange, if it runs both halves of an operation in one kernel; else None."""
        ...

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

    def release(self, received: Received) -> None:
        """Gives the bank of an INDEX view back to the senders. Has no effect on other views."""
        ...

    def check(self) -> None:
        """Raises what the transport has found since the last call. Never waits."""
        ...

    def statistics(self) -> ExchangeStatistics:
        """Cumulative measurements. Any thread may call it."""
        ...

    def close(self) -> None:
        """Frees segments and mappings; idempotent. Pending operations are dropped."""
        ...


class FusedExchange(Exchange, Protocol):
    """An exchange of a GPU that runs both halves of an operation in one kernel, without the host."""

    device: torch.device

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        view: View = View.PADDED,
        *,
        capacity: int | None = None,
        expert_stats: torch.Tensor | None = None,
        most_tokens: int | None = None,
        next_reads_ahead: bool = False,
    ) -> Received:
        """dispatch_send and recv in one kernel.

        Args:
            capacity: rows of a COMPACT or INDEX view; None = as many as can come.
            expert_stats: [E_local] int32, += rows received.
            most_tokens: of any rank, as far as the caller knows. More are served too, and slower.
            next_reads_ahead: the stream's next kernel may be set up at once. Until it waits for this one, it
              must touch nothing that this or an earlier kernel writes.
        """
        ...

    def combine(
        self,
        expert_out: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        *,
        next_reads_ahead: bool = False,
        add_norm: AddNorm | None = None,
    ) -> torch.Tensor:
        """combine_send and recv in one kernel. add_norm: see AddNorm; None = the sums themselves."""
        ...

    def can_norm(self, norm: AddNorm) -> bool:
        """Whether combine takes this add_norm."""
        ...

    def bounded(self, num_sms: int) -> AbstractContextManager[None]:
        """What is enqueued inside fills at most this many multiprocessors."""
        ...
