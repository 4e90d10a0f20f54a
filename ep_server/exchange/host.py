"""The exchange on CPU tensors, over csrc: ranks share the memory of one host or are joined by libfabric.

Checks tensors, allocates outputs and unwraps pointers. The four halves, waiting and arithmetic are in csrc.
Durations in ns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, cast

import torch

from ep_server import _C
from ep_server.errors import InvalidArgument, StartupError
from ep_server.exchange.api import (
    Capabilities,
    ExchangeStatistics,
    Handle,
    Payload,
    PendingCombine,
    PendingDispatch,
    Received,
    RecvOptions,
    Reduction,
    View,
    Wire,
)
from ep_server.exchange.faults import Fault, encode_faults
from ep_server.exchange.shapes import VIEWS, Shapes, Tensors
from ep_server.exchange.spec import REDUCTIONS, ExchangeSpec, Waiting, check_segment, geometry_of
from ep_server.exchange.validate import (
    check_combine_weights,
    check_dispatch,
    combine_mode,
    handle_of,
    rank_bits,
)

HostHandle = Handle[_C.DispatchState]
WIRES = frozenset({Wire.BF16})


class Link(Protocol):
    """Carries what ranks write to one another, where that is not shared memory alone."""

    def close(self) -> None:
        """Ends it once nothing is on its way; idempotent."""
        ...


class HostGroup:
    """One rank's place in a group: votes, membership, faults, measurements; no operation.

    Satisfies api.Membership. GPUs of one host use it alone, beside their own memory.

    Args:
        native: the end of csrc.
        link: closed with the group.
    """

    def __init__(
        self, spec: ExchangeSpec, native: _C.Exchange, on_timeout: str = "raise", link: Link | None = None
    ) -> None:
        self._native: _C.Exchange | None = native  # first: the memory it uses is freed later
        self.spec, self.on_timeout, self.link = spec, on_timeout, link

    @property
    def native(self) -> _C.Exchange:
        """The end of csrc. Raises InvalidArgument once the group is closed."""
        if self._native is None:
            raise InvalidArgument("exchange", "closed", "open")
        return self._native

    def all_gather(self, record: bytes) -> list[bytes]:
        """As the Protocol says. The record of a masked rank is empty."""
        return self.native.all_gather(record, self.spec.timeout_ns)

    def barrier(self) -> None:
        """As the Protocol says. Waits as long as the heartbeats of all peers continue."""
        self.native.all_gather(b"")

    @property
    def masked(self) -> frozenset[int]:
        """See Membership."""
        bits = self.native.masked
        return frozenset(r for r in range(self.spec.num_ranks) if bits >> r & 1)

    @property
    def live(self) -> frozenset[int]:
        """See Membership."""
        return frozenset(range(self.spec.num_ranks)) - self.masked

    def mask(self, ranks: Iterable[int]) -> None:
        """See Membership."""
        self.native.mask(rank_bits(self.spec, ranks))

    def reset(self, dead: Iterable[int] = (), generation: int = 0) -> None:
        """See Membership.

        Raises: PeerTimeout("reset", ...), without an abort: call again once the rank is there.
        """
        self.native.reset(rank_bits(self.spec, dead), generation)

    def abort(self) -> None:
        """Ends every wait of the group with GroupAborted until reset(). Any thread may call it."""
        self.native.abort()

    def set_faults(self, faults: Iterable[Fault]) -> None:
        """Replaces the fault plan; faults of other ranks are ignored."""
        self.native.set_faults(encode_faults(faults, self.spec.rank))

    def statistics(self) -> ExchangeStatistics:
        """As the Protocol says."""
        return cast("ExchangeStatistics", self.native.statistics())

    def close(self) -> None:
        """Leaves the group; idempotent."""
        if self.link is not None:
            self.link.close()
        self._native = None


class HostExchange:
    """One rank's end of an exchange. Satisfies api.Exchange on CPU tensors.

    Args:
        group: owned by the exchange from now on.
        region: uint8, dispatched rows of all banks; where the ranks of a host share rows, from the first
          rank's to the last one's. None = on the host, where csrc has it.
        once_per_host: a row is written once for all ranks of a host, which read it in the sender's memory.
    """

    fused = None

    def __init__(
        self, group: HostGroup, region: torch.Tensor | None = None, *, once_per_host: bool = False
    ) -> None:
        self.group, self.spec, self._once = group, group.spec, once_per_host
        self.shapes, self.layout = Shapes(self.spec), _C.Layout(geometry_of(self.spec))
        self.membership, self.all_gather, self.barrier = group, group.all_gather, group.barrier
        self.statistics = group.statistics
        if region is None:
            region = torch.frombuffer(memoryview(group.native.rows_region()), dtype=torch.uint8)
        self._banks = [self._bank(region, bank) for bank in range(self.spec.num_banks)]
        self._normal: HostExchange | None = None
        self.capabilities = Capabilities(
            payloads=frozenset(Payload),
            views=frozenset(View) - {View.INDEX} if once_per_host else frozenset(View),
            cheapest_view=View.COMPACT,
            graph_safe=False,
            micro_batches=self.spec.num_banks,
            memory_bytes=self.layout.total,
            fills=True,
            wires=WIRES,
        )

    @property
    def normal(self) -> HostExchange | None:
        """As the Protocol says."""
        if self._normal is None and not self._once and self.spec.num_ranks > 1:
            self._normal = HostExchange(self.group, once_per_host=True)
        return self._normal

    def dispatch_send(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> PendingDispatch:
        """As the Protocol says. x, ids and weights may be overwritten once it returns."""
        check_dispatch(self.spec, self.shapes.device, x, topk_ids, topk_weights)
        return self.start_dispatch(x.data_ptr(), topk_ids, topk_weights)

    def start_dispatch(
        self, x: int, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> PendingDispatch:
        """dispatch_send of checked tensors. x: address of the rows; 0 = in this rank's region already."""
        weights = 0 if topk_weights is None else topk_weights.data_ptr()
        ids, tokens = topk_ids.data_ptr(), topk_ids.shape[0]
        state = self.group.native.dispatch_send(x, ids, weights, tokens, self._once)
        handle: HostHandle = Handle(self, state.tokens, topk_weights is not None, state)

        def receive(view: View, options: RecvOptions) -> Received:
            if view not in self.capabilities.views:
                allowed = "one of " + ", ".join(sorted(self.capabilities.views))
                raise InvalidArgument("view", str(view), allowed)
            if options:
                self.shapes.check_recv(view, options)
            self.group.native.dispatch_wait(state)
            return self._expand(handle, view, options)

        return PendingDispatch(receive)

    def combine_send(
        self,
        expert_out: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        *,
        reduction: Reduction | None = None,
        wire: Wire = Wire.BF16,
    ) -> PendingCombine:
        """As the Protocol says. expert_out is read in place and may be overwritten once it returns."""
        handle: HostHandle = handle_of(received, self)
        mode = combine_mode(self.spec, reduction, wire, WIRES)
        self.shapes.check_outputs(expert_out, received.view, handle.state.num_rows)
        state = self.start_combine(handle, expert_out.data_ptr(), topk_weights, mode.reduction)

        def receive(out: torch.Tensor | None, wait_stats: torch.Tensor | None) -> torch.Tensor:
            self.shapes.check_wait_stats(wait_stats)
            out = self.shapes.result(handle.tokens, out)
            self.group.native.combine_recv(state, out.data_ptr())
            self._add_waits(wait_stats, state)
            return out

        return PendingCombine(receive)

    def start_combine(
        self, handle: HostHandle, expert_out: int, weights: torch.Tensor | None, reduction: Reduction
    ) -> _C.CombineState:
        """combine_send of outputs at an address; 0 = in their places already."""
        check_combine_weights(self.spec, self.shapes.device, handle, weights, reduction)
        address = 0 if weights is None else weights.data_ptr()
        return self.group.native.combine_send(handle.state, expert_out, address, REDUCTIONS.index(reduction))

    def empty_padded(self) -> Tensors:
        """As the Protocol says."""
        return self.shapes.padded()

    def release(self, received: Received) -> None:
        """As the Protocol says."""
        self.group.native.dispatch_release(handle_of(received, self).state)

    def check(self) -> None:
        """Does nothing: on the CPU, the call that finds a failure raises it."""

    def close(self) -> None:
        """As the Protocol says. INDEX rows that a caller still holds stay readable."""
        self.group.close()
        self._banks = []

    def __repr__(self) -> str:
        spec, what = self.spec, f"{self.spec.payload}, {self.spec.reduction}, {self.layout.total} bytes"
        return f"HostExchange(rank={spec.rank}/{spec.num_ranks}, {what})"

    def _expand(self, handle: HostHandle, view: View, options: RecvOptions) -> Received:
        shapes, state, native = self.shapes, handle.state, self.group.native
        counts = options.get("counts")
        counts, offsets, row_ids = shapes.counts() if counts is None else counts, shapes.offsets(), None
        into = (0, 0, 0)  # addresses of rows, scales, row ids
        if view is View.INDEX:
            rows, scales = self._banks[state.bank]
            row_ids = shapes.row_ids(state.num_rows)
            into = (0, 0, row_ids.data_ptr())
        else:
            if view is View.COMPACT:
                rows, scales = shapes.compact(state.num_rows)
            else:
                rows, scales = options.get("out") or shapes.padded()
            into = (rows.data_ptr(), 0 if scales is None else scales.data_ptr(), 0)
        native.dispatch_expand(state, VIEWS[view], *into, counts.data_ptr(), offsets.data_ptr())
        if options:
            self._fill(state, counts, options)
        return Received(rows, counts, offsets, handle, view, scales, row_ids)

    def _fill(self, state: _C.DispatchState, counts: torch.Tensor, options: RecvOptions) -> None:
        if (source_map := options.get("source_map")) is not None:
            info, ranges = source_map[0].fill_(-1), source_map[1].zero_()
            self.group.native.source_map(state, info.data_ptr(), ranges.data_ptr())
        if (stats := options.get("expert_stats")) is not None:
            stats.add_(counts)
        self._add_waits(options.get("wait_stats"), state)

    def _add_waits(self, wait_stats: torch.Tensor | None, state: _C.DispatchState | _C.CombineState) -> None:
        if wait_stats is not None:
            wait_stats.add_(torch.tensor(state.wait_ns(self.spec.num_ranks), dtype=torch.int64))

    def _bank(self, region: torch.Tensor, bank: int) -> Tensors:
        """[R * max_tokens or more, H] of one bank and their scales, in place."""
        layout, pitch = self.layout, self.layout.row_pitch
        count = self.shapes.padded_rows + (region.numel() - layout.combine + layout.rows) // pitch
        begin = layout.row_at(bank, 0, 0) - layout.rows
        block = region[begin : begin + count * pitch].view(count, pitch)
        rows = block[:, : layout.row_bytes].view(self.shapes.row_dtype)
        if not self.shapes.fp8:
            return rows, None
        end = layout.scale_offset + layout.scale_bytes
        return rows, block[:, layout.scale_offset : end].view(self.shapes.scale_dtype)


def open_group(spec: ExchangeSpec, fd: int, waiting: Waiting | None = None) -> HostGroup:
    """This rank's place in the group of a segment.

    Args:
        spec: this rank's; all other fields agree with the segment's.
        fd: of the segment (segment.create_segment). Stays the caller's, who may close it.
    Raises: ConfigError, StartupError.
    """
    geometry, waiting = geometry_of(spec), waiting or Waiting()
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
    return HostGroup(spec, native, waiting.on_timeout)


def open_shm(spec: ExchangeSpec, fd: int, waiting: Waiting | None = None) -> HostExchange:
    """This rank's end of the exchange in a segment; see open_group."""
    return HostExchange(open_group(spec, fd, waiting))
