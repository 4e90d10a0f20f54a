"""The seam of expert parallelism: the Protocol of an exchange, which dispatches tokens and combines results.

`factory.open_exchange` chooses the transport: HostExchange in shared memory or over a network,
NvlinkExchange, FabricDeviceExchange or HierarchicalExchange. `testing.reference_exchange` does the same with
collectives. One conformance suite runs on each. This module imports no transport.

Shapes: R ranks; T <= max_tokens tokens on this rank; H hidden; K top_k; E physical experts, of which
E_local belong to this rank: the ascending ids e with placement[e] == rank.
Operations are collective: every rank calls the same sequence of halves, with T = 0 if it has no token.
At most `num_banks` dispatches may be between their send and the matching combine_recv.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Generic, NotRequired, Protocol, TypedDict, TypeVar, Unpack

from ep_server.errors import InvalidArgument
from ep_server.exchange.spec import ExchangeSpec, Payload, Reduction

if TYPE_CHECKING:  # the front plans groups from a spec, and has no torch
    import torch

    Tensors = tuple[torch.Tensor, torch.Tensor | None]  # rows and scales

__all__ = [
    "Abortable", "AddNorm", "Capabilities", "Exchange", "ExchangeSpec", "ExchangeStatistics", "FusedExchange",
    "Handle", "Membership", "Payload", "PendingCombine", "PendingDispatch", "Received", "RecvOptions",
    "Reduction", "View", "Wire", "chosen",
]  # fmt: skip
State = TypeVar("State")
Choice = TypeVar("Choice", bound=StrEnum)


def chosen(field: str, kind: type[Choice], value: str) -> Choice:
    """The member of `kind` with this value. Raises InvalidArgument."""
    try:
        return kind(value)
    except ValueError as error:
        raise InvalidArgument(field, str(value), "one of " + ", ".join(kind)) from error


class Wire(StrEnum):
    """How the rows of a combine travel. The order is that of csrc/exchange/nvlink/state.hpp."""

    BF16 = "bf16"  # or float32 where the payload is FP32
    FP8 = "fp8"  # e4m3, one float32 scale per 128 channels
    LOG10 = "log10"  # sign and 9 bits of logarithm, a range per 128 channels


class View(StrEnum):
    """How received rows are laid out."""

    COMPACT = "compact"  # [N, H] rows ordered by (local expert, source rank, source token)
    PADDED = "padded"  # [E_local, R * max_tokens, H], counts[e] valid rows each, same order inside an expert
    # No copy: [R * max_tokens, H] region of deduplicated rows + row ids per (expert, entry); more rows, also
    # of other ranks, if the ranks of a host share rows received over a network.
    INDEX = "index"


@dataclass(slots=True)
class Received:
    """Rows this rank received for its experts, after dispatch_recv.

    rows: see View; dtype float32 (FP32), bfloat16 (BF16) or float8_e4m3fn (FP8*).
    scales: FP8 only, float32 [N, H/128] (COMPACT) or column-major [E_local, R*max_tokens, H/128]
      (PADDED, strides as DeepEP: the token dimension is the contiguous one); UE8M0: int32 [.., H/512].
    counts: [E_local] int32, rows per local expert.
    offsets: [E_local + 1] int64, exclusive prefix sum of counts (COMPACT).
    row_ids: INDEX only, [N] int64 in COMPACT order: which row of `rows` each entry reads.
    handle: what combine_send needs: a Handle of the exchange. Valid until combine_recv.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    handle: object
    view: View = View.COMPACT
    scales: torch.Tensor | None = None
    row_ids: torch.Tensor | None = None


@dataclass(slots=True)
class Handle(Generic[State]):
    """What a dispatch leaves for its combine.

    owner: who made it; other exchanges refuse it, and so does a later generation.
    tokens: T. weighted: dispatch got the weights. state: of the transport.
    """

    owner: object
    tokens: int
    weighted: bool
    state: State


@dataclass(frozen=True, slots=True)
class AddNorm:
    """Residual addition and RMS norm after a combine on a GPU. All tensors are bfloat16 and contiguous.

    Three results, each rounded once: sum + shared; residual + that, stored; the RMS norm of the stored value.

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
    fills: whether a receive writes to tensors that the caller gives (see RecvOptions).
    wires: that its combines accept.
    """

    payloads: frozenset[Payload]
    views: frozenset[View]
    cheapest_view: View
    graph_safe: bool
    micro_batches: int
    memory_bytes: int
    fills: bool = False
    wires: frozenset[Wire] = frozenset({Wire.BF16})


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
    """Which ranks of a group take part, where the group can lose a rank and continue."""

    @property
    def live(self) -> frozenset[int]:
        """Ranks of this generation that are not masked, this one included."""
        ...

    @property
    def masked(self) -> frozenset[int]:
        """Ranks that this one neither writes to nor waits for."""
        ...

    def mask(self, ranks: Iterable[int]) -> None:
        """Stops communicating with these ranks, also in a wait of another thread. Local to this rank."""
        ...

    def reset(self, dead: Iterable[int] = (), generation: int = 0) -> None:
        """Starts a new generation: no abort, no operation in flight, no mask except `dead`. Collective.

        generation: its number, if some ranks missed earlier ones or failed to form them; 0 = the next.
        All ranks outside `dead` call it with the same `dead`. Pending operations and views are dropped.
        """
        ...


class RecvOptions(TypedDict, total=False):
    """What a receive fills besides its view, and hints of the caller. None = as if not given.

    Where Capabilities.fills, all tensors on the device of the exchange:
    out: rows and scales of an earlier empty_padded(); PADDED only. counts: [E_local] int32.
    source_map: src_info [E_local, R * max_tokens] int32, source token of each row; layout_range [E_local, R]
      int64, begin << 32 | count of each source's rows. PADDED only.
    expert_stats: [E_local] int32, += rows received. wait_stats: [R] int64, += ns waited for each rank.

    Hints, which an exchange may ignore:
    capacity: rows of a COMPACT or INDEX view. On a GPU None = as many as can arrive, cut to those that did,
      for which the host waits unless the call is captured. More rows than the capacity fail at the next call.
    most_tokens: of any rank, as far as known. More are served too, and slower.
    next_reads_ahead: the stream's next kernel may be set up at once. Until it waits for this one, it must
      touch nothing that this or an earlier kernel writes.
    """

    out: Tensors | None
    counts: torch.Tensor | None
    source_map: tuple[torch.Tensor, torch.Tensor] | None
    expert_stats: torch.Tensor | None
    wait_stats: torch.Tensor | None
    capacity: int | None
    most_tokens: int | None
    next_reads_ahead: bool


class PendingDispatch:
    """A dispatch whose send half has run. Between the halves nothing is held.

    Args:
        receive: the second half, of the transport.
    """

    __slots__ = ("_receive", "received")

    def __init__(self, receive: Callable[[View, RecvOptions], Received]) -> None:
        self._receive, self.received = receive, False

    def recv(self, view: View = View.COMPACT, **options: Unpack[RecvOptions]) -> Received:
        """Waits for the headers and rows of all unmasked peers. Call exactly once.

        Raises: InvalidArgument, PeerTimeout, GroupAborted, ProtocolViolation.
        """
        if self.received:
            raise InvalidArgument("dispatch", "received", "received once")
        if view.__class__ is not View:
            view = chosen("view", View, view)
        received = self._receive(view, options)
        self.received = True
        return received


class PendingCombine:
    """A combine whose send half has run.

    Args:
        receive: the second half, of the transport, which gets out and wait_stats.
    """

    __slots__ = ("_receive", "received")

    def __init__(self, receive: Callable[[torch.Tensor | None, torch.Tensor | None], torch.Tensor]) -> None:
        self._receive, self.received = receive, False

    def recv(
        self, out: torch.Tensor | None = None, *, wait_stats: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Waits for all returning rows and reduces them. Call exactly once.

        Args:
            out: [T, H] written in place when given; float32 (FP32) or bfloat16.
            wait_stats: see RecvOptions.
        Returns: [T, H], the weighted sum over k; a token whose ids are all -1 gives zeros.
        Raises: InvalidArgument, PeerTimeout, GroupAborted, ProtocolViolation.
        """
        if self.received:
            raise InvalidArgument("combine", "received", "received once")
        result = self._receive(out, wait_stats)
        self.received = True
        return result


class Exchange(Protocol):
    """One rank's end of the exchange. One thread at a time may call it; calls release the GIL."""

    spec: ExchangeSpec

    @property
    def capabilities(self) -> Capabilities:
        """What this exchange can do."""
        ...

    @property
    def membership(self) -> Membership | None:
        """Which ranks take part; None where the group ends as soon as it loses a rank."""
        ...

    @property
    def fused(self) -> FusedExchange | None:
        """This exchange, if it runs both halves of an operation in one kernel; else None."""
        ...

    @property
    def normal(self) -> Exchange | None:
        """The same ranks' operations for many rows at once, or None. Neither kind starts during the other."""
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
        *,
        reduction: Reduction | None = None,
        wire: Wire = Wire.BF16,
    ) -> PendingCombine:
        """Returns the experts' outputs to the tokens' sources.

        Args:
            expert_out: in the layout of `received` (COMPACT [N, H]; PADDED [E_local, R*max_tokens, H];
              INDEX takes COMPACT [N, H]), float32 (FP32) or bfloat16. Row i answers row i.
            topk_weights: [T, K] float32 of this rank's own tokens, where dispatch got None.
            reduction: None = the spec's. A spec with SOURCE has room for RANK too. All ranks choose alike.
            wire: one of Capabilities.wires. All ranks choose alike.
        """
        ...

    def empty_padded(self) -> Tensors:
        """Rows and scales of a PADDED view, not yet written; see RecvOptions.out."""
        ...

    def all_gather(self, record: bytes) -> list[bytes]:
        """The vote: gathers one record of <= 64 bytes from every rank, in rank order.

        Has the deadline of all waits. Ranks that may be far apart call barrier() first.
        """
        ...

    def barrier(self) -> None:
        """Returns once every rank has called it. Has no deadline while all are alive."""
        ...

    def release(self, received: Received) -> None:
        """Gives the bank of an INDEX view back to the senders. Has no effect on other views."""
        ...

    def check(self) -> None:
        """Raises a failure that was found since the last call. Never waits."""
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
        **options: Unpack[RecvOptions],
    ) -> Received:
        """dispatch_send and recv in one kernel: rows are placed while others are on their way."""
        ...

    def combine(
        self,
        expert_out: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        reduction: Reduction | None = None,
        wire: Wire = Wire.BF16,
        wait_stats: torch.Tensor | None = None,
        next_reads_ahead: bool = False,
        add_norm: AddNorm | None = None,
    ) -> torch.Tensor:
        """combine_send and recv in one kernel.

        Args:
            next_reads_ahead: see RecvOptions. add_norm: see AddNorm; None = the sums themselves.
        """
        ...

    def can_norm(self, norm: AddNorm) -> bool:
        """Whether combine takes this add_norm."""
        ...

    def bounded(self, num_sms: int) -> AbstractContextManager[Callable[[], None]]:
        """Kernels inside fill at most this many multiprocessors. The callable waits for an injected delay."""
        ...
