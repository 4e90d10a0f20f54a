"""The native exchange: the Protocol of exchange.py over csrc, on CPU tensors and one host's memory.

Checks tensors, allocates outputs and unwraps pointers; the four halves, waiting and arithmetic are in csrc.
Knows nothing of how the segment got here (segment.py). Durations in ns.

Beyond the Protocol, for users who build their own API on it:
    ShmExchange(spec, fd=..., spin_us=-1, liveness_seconds=30.0, on_timeout="raise" | "mask")
    .combine_send(..., reduction=...)       chooses by operation where the spec says SOURCE
    .empty_padded(), PendingDispatch.recv(out=...)   tensors that exist before they are received
    .release(received)                      gives an INDEX view's bank back without a combine
    .source_map(received)                   DeepEP's (src_info, layout_range)
    .masked, .mask(ranks), .reset(dead=())  membership; .abort()
    PendingDispatch.wait_ns, PendingCombine.wait_ns   int64 [R] per source, after recv
    .statistics(), .set_faults(faults)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch

from ep_server import _C
from ep_server.errors import InvalidArgument, StartupError
from ep_server.exchange.api import (
    Capabilities,
    ExchangeSpec,
    ExchangeStatistics,
    Membership,
    Payload,
    Received,
    Reduction,
    View,
)
from ep_server.exchange.faults import Fault, encode_faults
from ep_server.exchange.geometry import REDUCTIONS, check_segment, geometry_of
from ep_server.exchange.validate import check_tensor, fits
from ep_server.exchange.views import Tensors, Views
from ep_server.exchange.waiting import Waiting


class ShmGroup:
    """What ShmExchange is without its operations.

    Args:
        native: the end of csrc.
    """

    def __init__(self, spec: ExchangeSpec, native: _C.Exchange) -> None:
        self.spec = spec
        self._native: _C.Exchange | None = native

    def all_gather(self, record: bytes) -> list[bytes]:
        """As the Protocol says; a masked rank's record is empty."""
        return self._open().all_gather(record, self.spec.timeout_ns)

    def barrier(self) -> None:
        """As the Protocol says. Waits while every peer's heartbeat goes on: ranks meet here after loading."""
        self._open().all_gather(b"")

    # -- membership, failure, measurement -------------------------------------------------------------

    @property
    def membership(self) -> Membership:
        """As the Protocol says."""
        return self

    @property
    def masked(self) -> frozenset[int]:
        """Ranks that this one neither writes to nor waits for."""
        bits = self._open().masked
        return frozenset(r for r in range(self.spec.num_ranks) if bits >> r & 1)

    def mask(self, ranks: Iterable[int]) -> None:
        """Stops talking to these ranks, also in a wait in progress in another thread. Local to this rank."""
        self._open().mask(self._bits(ranks))

    def reset(self, dead: Iterable[int] = ()) -> None:
        """Starts a new generation: no abort, no operation in flight, no mask but `dead`. Collective.

        All ranks outside `dead` call it with the same `dead`. Pending operations and views are dropped.
        Raises: PeerTimeout("reset", ...), which aborts nobody: call again once the rank is there.
        """
        self._open().reset(self._bits(dead))

    def abort(self) -> None:
        """Ends every wait of the group with GroupAborted until reset(). Any thread may call it."""
        self._open().abort()

    def check(self) -> None:
        """Does nothing: on the CPU, the call that finds a failure raises it."""

    def set_faults(self, faults: Iterable[Fault]) -> None:
        """Replaces the fault plan; faults of other ranks are ignored."""
        self._open().set_faults(encode_faults(faults, self.spec.rank))

    def statistics(self) -> ExchangeStatistics:
        """As the Protocol says."""
        return cast("ExchangeStatistics", self._open().statistics())

    # -- inside ---------------------------------------------------------------------------------------

    def _open(self) -> _C.Exchange:
        if self._native is None:
            raise InvalidArgument("exchange", "closed", "open")
        return self._native

    def _bits(self, ranks: Iterable[int]) -> int:
        bits = 0
        for rank in ranks:
            if not 0 <= rank < self.spec.num_ranks or rank == self.spec.rank:
                raise InvalidArgument("ranks", rank, f"0 to {self.spec.num_ranks - 1}, not this rank itself")
            bits |= 1 << rank
        return bits


VIEWS = {View.COMPACT: 0, View.PADDED: 1, View.INDEX: 2}  # the numbers of csrc/exchange/common/params.hpp


class PendingDispatch:
    """A dispatch whose send half has run. See exchange.PendingDispatch."""

    __slots__ = ("_exchange", "_state", "_waited")

    def __init__(self, exchange: ShmExchange, state: _C.DispatchState) -> None:
        self._exchange, self._state = exchange, state
        self._waited = False

    def recv(self, view: View = View.COMPACT, *, out: Tensors | None = None) -> Received:
        """As the Protocol says. INDEX rows stay valid until combine_send or release().

        Args:
            out: rows and scales of an earlier empty_padded(), filled instead of new ones; PADDED only.
        """
        exchange, state = self._exchange, self._state
        native = exchange._native or exchange._open()
        if view not in VIEWS:
            view = View(view)
        if self._waited:
            raise InvalidArgument("dispatch", f"epoch {state.epoch}", "received once")
        if out is not None:
            exchange.views.check_out(view, out)
        native.dispatch_wait(state)
        self._waited = True
        return exchange._expand(state, view, out)

    @property
    def wait_ns(self) -> torch.Tensor:
        """[R] int64: how long recv() waited for each source's header."""
        return torch.tensor(self._state.wait_ns(self._exchange.spec.num_ranks), dtype=torch.int64)


class PendingCombine:
    """A combine whose send half has run. See exchange.PendingCombine."""

    __slots__ = ("_exchange", "_state", "_tokens")

    def __init__(self, exchange: ShmExchange, state: _C.CombineState, tokens: int) -> None:
        self._exchange, self._state, self._tokens = exchange, state, tokens

    def recv(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """As the Protocol says."""
        exchange, state = self._exchange, self._state
        native = exchange._native or exchange._open()
        if state.received:
            raise InvalidArgument("combine", f"epoch {state.epoch}", "received once")
        shape, dtype = (self._tokens, exchange.spec.hidden), exchange.combine_dtype
        if out is None:
            out = torch.empty(shape, dtype=dtype)
        elif not fits(out, dtype, shape):
            check_tensor("out", out, dtype, T=shape[0], H=shape[1])
        native.combine_recv(state, out.data_ptr())
        return out

    @property
    def wait_ns(self) -> torch.Tensor:
        """[R] int64: how long recv() waited for each rank's header."""
        return torch.tensor(self._state.wait_ns(self._exchange.spec.num_ranks), dtype=torch.int64)


class ShmExchange(ShmGroup):
    """One rank's end of a group. Satisfies exchange.Exchange; one thread at a time may call the halves.

    Args:
        spec: this rank's; all other fields agree with the group's segment.
        fd: descriptor of the segment (segment.create_segment). Stays the caller's, who may close it.
        spin_us: busy wait before yielding and sleeping; -1 = 0 where ranks outnumber usable cores, else 50.
        liveness_seconds: a barrier has no deadline, but ends if a peer's heartbeat stops for so long.
        on_timeout: "raise" aborts the group and raises PeerTimeout; "mask" goes on without the peer.
    Raises: ConfigError, StartupError.
    """

    def __init__(
        self,
        spec: ExchangeSpec,
        *,
        fd: int,
        spin_us: int = -1,
        liveness_seconds: float = 30.0,
        on_timeout: str = "raise",
    ) -> None:
        geometry = geometry_of(spec)
        waiting = Waiting(spin_us, liveness_seconds, on_timeout)
        try:
            check_segment(spec, _C.Segment(fd).geometry)
            native = _C.Exchange(
                fd=fd,
                geometry=geometry,
                rank=spec.rank,
                placement=list(spec.placement),
                **waiting.native(spec, ranks_here=spec.num_ranks),
            )
        except (OSError, ValueError) as error:
            raise StartupError(
                f"rank {spec.rank} cannot map the exchange segment of descriptor {fd}: {error}"
            ) from error
        self._attach(spec, native, waiting)

    def _attach(
        self, spec: ExchangeSpec, native: _C.Exchange, waiting: Waiting, region: torch.Tensor | None = None
    ) -> None:
        """Whatever carries it, an exchange is its spec, its native end and the tensors over its region.

        Args:
            region: see Views; None = on the host, where the native end has it.
        """
        super().__init__(spec, native)
        self.on_timeout = waiting.on_timeout
        self.layout = _C.Layout(geometry_of(spec))
        if region is None:
            region = torch.frombuffer(memoryview(native.rows_region()), dtype=torch.uint8)
        self._views: Views | None = Views(spec, self.layout, region)
        self.combine_dtype, self.row_dtype = self._views.combine_dtype, self._views.row_dtype
        self.capabilities = Capabilities(
            payloads=frozenset(Payload),
            views=frozenset(View),
            cheapest_view=View.COMPACT,
            graph_safe=False,
            micro_batches=spec.num_banks,
            memory_bytes=self.layout.total,
        )
        self.fused = None

    # -- the Protocol ---------------------------------------------------------------------------------

    def dispatch_send(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> PendingDispatch:
        """As the Protocol says. x, ids and weights may be overwritten once it returns."""
        native, spec = self._native or self._open(), self.spec
        tokens = x.shape[0] if x.dim() == 2 else -1
        choices = (tokens, spec.top_k)
        if not fits(x, self.combine_dtype, (tokens, spec.hidden)):
            check_tensor("x", x, self.combine_dtype, T=tokens, H=spec.hidden)
        if tokens > spec.max_tokens:
            raise InvalidArgument("x", f"T = {tokens}", f"at most max_tokens = {spec.max_tokens} tokens")
        if not fits(topk_ids, torch.int64, choices):
            check_tensor("topk_ids", topk_ids, torch.int64, T=tokens, K=spec.top_k)
        weights = 0
        if topk_weights is not None:
            if not fits(topk_weights, torch.float32, choices):
                check_tensor("topk_weights", topk_weights, torch.float32, T=tokens, K=spec.top_k)
            weights = topk_weights.data_ptr()
        elif spec.reduction == Reduction.RANK:
            raise InvalidArgument("topk_weights", None, "given at dispatch for reduction rank")
        return PendingDispatch(self, native.dispatch_send(x.data_ptr(), topk_ids.data_ptr(), weights, tokens))

    def combine_send(
        self,
        expert_out: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        *,
        reduction: Reduction | None = None,
    ) -> PendingCombine:
        """As the Protocol says. expert_out is read in place and may be overwritten once it returns.

        Args:
            reduction: None = the spec's. A spec with SOURCE has room for RANK too, where dispatch got
              weights; all ranks choose alike.
        """
        state = self._state_of(received)
        self.views.check_expert_out(received.view, expert_out, state.num_rows)
        return self._combine(state, expert_out.data_ptr(), topk_weights, reduction)

    def _combine(
        self,
        state: _C.DispatchState,
        expert_out: int,
        topk_weights: torch.Tensor | None,
        reduction: Reduction | None,
    ) -> PendingCombine:
        """combine_send of rows at an address."""
        native, spec = self._native or self._open(), self.spec
        chosen, weights = self.checked_reduction(reduction), 0
        if topk_weights is not None:
            if state.has_weights or chosen == Reduction.RANK:
                raise InvalidArgument("topk_weights", "a tensor", "None: this dispatch was given them")
            check_tensor("topk_weights", topk_weights, torch.float32, T=state.tokens, K=spec.top_k)
            weights = topk_weights.data_ptr()
        elif chosen is Reduction.SOURCE and not state.has_weights and state.tokens:
            raise InvalidArgument("topk_weights", None, "given at dispatch or at combine")
        combine = native.combine_send(state, expert_out, weights, REDUCTIONS.index(chosen))
        return PendingCombine(self, combine, state.tokens)

    def checked_reduction(self, reduction: Reduction | None) -> Reduction:
        """The one that a combine takes. Raises InvalidArgument where the spec has no room for its rows."""
        chosen = self.spec.reduction if reduction is None else Reduction(reduction)
        if chosen is not self.spec.reduction and self.spec.reduction is Reduction.RANK:
            raise InvalidArgument("reduction", str(chosen), "rank, as the spec says")
        return chosen

    def close(self) -> None:
        """As the Protocol says. INDEX rows that a caller still holds stay readable."""
        self._native = None
        self._views = None

    # -- views ----------------------------------------------------------------------------------------

    @property
    def views(self) -> Views:
        """Shapes and tensors of the three views."""
        if self._views is None:
            raise InvalidArgument("exchange", "closed", "open")
        return self._views

    def empty_padded(self) -> Tensors:
        """Rows and scales of a PADDED view, not yet written: to be handed out before they are received."""
        return self.views.padded()

    def release(self, received: Received) -> None:
        """Gives the bank of an INDEX view back to the senders; without effect on other views."""
        self._open().dispatch_release(self._state_of(received))

    def source_map(self, received: Received) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the rows of the padded order came from, as DeepEP's handle says it.

        Returns: src_info int32 [E_local, R * max_tokens], source token of each row (unused: -1);
          layout_range int64 [E_local, R], begin << 32 | count of each source's rows.
        """
        views = self.views
        info = torch.full((views.num_local, views.padded_rows), -1, dtype=torch.int32)
        ranges = torch.zeros((views.num_local, self.spec.num_ranks), dtype=torch.int64)
        self._open().source_map(self._state_of(received), info.data_ptr(), ranges.data_ptr())
        return info, ranges

    def __repr__(self) -> str:
        spec, size = self.spec, self.layout.total
        what = f"{spec.payload}, {spec.reduction}, {size} bytes"
        return f"ShmExchange(rank={spec.rank}/{spec.num_ranks}, {what})"

    # -- inside ---------------------------------------------------------------------------------------

    def _state_of(self, received: Received) -> _C.DispatchState:
        if not isinstance(received.handle, _C.DispatchState):
            raise InvalidArgument("received.handle", received.handle, "of a dispatch of this exchange")
        return received.handle

    def _expand(self, state: _C.DispatchState, view: View, out: Tensors | None) -> Received:
        views, row_ids = self._views or self.views, None
        counts, offsets = views.counts(), views.offsets()
        into = (0, 0, 0)  # addresses of rows, scales, row ids
        if view is View.INDEX:
            rows, scales = views.index(state.bank)
            row_ids = views.row_ids(state.num_rows)
            into = (0, 0, row_ids.data_ptr())
        else:
            made = views.compact(state.num_rows) if view is View.COMPACT else out or views.padded()
            rows, scales = made
            into = (rows.data_ptr(), 0 if scales is None else scales.data_ptr(), 0)
        native = self._native or self._open()
        native.dispatch_expand(state, VIEWS[view], *into, counts.data_ptr(), offsets.data_ptr())
        return Received(rows, counts, offsets, state, view, scales, row_ids)
