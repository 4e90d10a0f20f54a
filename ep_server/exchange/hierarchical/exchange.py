"""The exchange of GPUs of several hosts: NVLink inside a host, host memory and the network between hosts.

It has two parts. `intra`, the exchange of one host's ranks, carries tokens whose experts are on their own
host. `inter`, a FabricDeviceExchange of all ranks, carries the others. Both send before either is waited for,
so the network works while GPUs write to one another. Received rows of both are put side by side in one view,
in the order of the Protocol. That costs one more pass over the intra rows, and one over the experts' outputs.

Sums: intra ranks in their order, rounded to the combine dtype; inter ranks likewise; both added in float32
and rounded. With reduction source the same over choices. One host rounds once, so a result may differ from
one host's by the rounding of the two parts. It is the same to the bit where a token has outputs of at most
one rank (or choice) in each part, as in groups of two hosts of one rank. It never depends on times.

Steps with many rows use `normal`: inside a host its operations for many rows, between hosts the same ones.
There a combine returns the rows inside a host once the sums of other hosts are here.

A late peer ends the group: only mask() masks ranks, in both parts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from ep_server.errors import ConfigError, GroupAborted, PeerTimeout, ProtocolViolation
from ep_server.exchange.api import (
    Capabilities,
    Exchange,
    ExchangeStatistics,
    Handle,
    Membership,
    PendingCombine,
    PendingDispatch,
    Received,
    RecvOptions,
    Reduction,
    View,
    Wire,
)
from ep_server.exchange.bootstrap import share_segment
from ep_server.exchange.fabric.device import FabricDeviceExchange
from ep_server.exchange.fabric.host_staging import Outgoing, ReceivedRows, Sent
from ep_server.exchange.hierarchical.host_part import (
    IdSplit,
    InterTables,
    Joined,
    entries_of,
    join,
)
from ep_server.exchange.host import WIRES
from ep_server.exchange.row_order import as_bytes
from ep_server.exchange.segment import create_segment
from ep_server.exchange.spec import ExchangeSpec, experts_of, ranks_of_host, spec_of_host
from ep_server.exchange.validate import check_dispatch, check_hints_only, check_ids, combine_mode, handle_of

K = TypeVar("K")
_MANY, _FEW = b"many", b"few"


@dataclass(frozen=True, slots=True)
class JoinedReceive:
    """State of a Handle. intra, inter: as the two exchanges received them."""

    intra: Received
    inter: Received
    joined: Joined


class HierarchicalMembership:
    """Membership of both parts; they mask the same ranks."""

    def __init__(self, intra: Membership, inter: Membership, intra_ranks: range, num_ranks: int) -> None:
        self._intra, self._inter, self._intra_ranks = intra, inter, intra_ranks
        self._all = frozenset(range(num_ranks))

    @property
    def masked(self) -> frozenset[int]:
        """See Membership."""
        return self._inter.masked | {self._intra_ranks[rank] for rank in self._intra.masked}

    @property
    def live(self) -> frozenset[int]:
        """See Membership."""
        return self._all - self.masked

    def mask(self, ranks: Iterable[int]) -> None:
        """See Membership."""
        gone = frozenset(ranks)
        self._inter.mask(gone)
        self._intra.mask(self._here(gone))

    def reset(self, dead: Iterable[int] = (), generation: int = 0) -> None:
        """See Membership."""
        gone = frozenset(dead)
        self._inter.reset(gone, generation)
        self._intra.reset(self._here(gone), generation)

    def _here(self, ranks: frozenset[int]) -> list[int]:
        return [rank - self._intra_ranks.start for rank in sorted(ranks) if rank in self._intra_ranks]


class HierarchicalExchange:
    """One rank's end of a group. Satisfies api.Exchange on tensors of inter's device.

    Args:
        intra: of this host's ranks, with the spec of host_part.spec_of_host; owned by this one from now on.
        inter: of all ranks; owned likewise.
        hosts: [R] number of each rank's host; the ranks of a host follow one another.
        many: the exchange of some host has operations for many rows; a host without them, such as one of a
          single rank, uses its only ones. The same on all ranks.
        validate: reads ids and checks them before anything is sent. Otherwise the part that gets a bad id
          refuses it, when the other may have sent. For tests: it waits for the device.
    Raises: ConfigError.
    """

    fused = None

    def __init__(
        self,
        intra: Exchange,
        inter: FabricDeviceExchange,
        hosts: tuple[int, ...],
        *,
        many: bool = False,
        validate: bool = False,
    ) -> None:
        spec = inter.spec
        self.intra_ranks = ranks_of_host(hosts, spec)
        if intra.spec != spec_of_host(spec, self.intra_ranks):
            raise ConfigError(
                "intra.spec", intra.spec, f"that of ranks {list(self.intra_ranks)} of inter.spec"
            )
        self.spec, self.intra, self.inter, self._validate = spec, intra, inter, validate
        self.all_gather, self.empty_padded = inter.all_gather, inter.empty_padded
        self._split = IdSplit(spec, self.intra_ranks, inter.device)
        self._tables = InterTables(spec, self.intra_ranks)
        self._intra_view = View.INDEX if View.INDEX in intra.capabilities.views else View.COMPACT
        self._normal: HierarchicalExchange | None = None
        if many:
            self._normal = HierarchicalExchange(intra.normal or intra, inter, hosts, validate=validate)

    @property
    def normal(self) -> Exchange | None:
        """As the Protocol says."""
        return self._normal

    @property
    def membership(self) -> Membership | None:
        """As the Protocol says."""
        intra, inter = self.intra.membership, self.inter.membership
        if intra is None:
            return None
        return HierarchicalMembership(intra, inter, self.intra_ranks, self.spec.num_ranks)

    @property
    def capabilities(self) -> Capabilities:
        """As the Protocol says. INDEX copies least: the other views are made of it."""
        intra, inter = self.intra.capabilities, self.inter.capabilities
        return Capabilities(
            payloads=intra.payloads & inter.payloads,
            views=frozenset(View),
            cheapest_view=View.INDEX,
            graph_safe=False,
            micro_batches=min(intra.micro_batches, self.spec.num_banks),
            memory_bytes=intra.memory_bytes + inter.memory_bytes,
        )

    def dispatch_send(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> PendingDispatch:
        """As the Protocol says. Waits for the caller's stream. Tensors must not change before the stream has
        passed this point.
        """
        self.inter.check_stream()
        check_dispatch(self.spec, self.inter.device, x, topk_ids, topk_weights)
        if self._validate:
            check_ids(self.spec, topk_ids)
        intra_ids, inter_ids = self._split(topk_ids)
        outgoing = self.inter.begin_dispatch(x, inter_ids, topk_weights)
        with self._beside(outgoing):
            intra = self.intra.dispatch_send(x, intra_ids, topk_weights)
        inter, tokens, weighted = outgoing.send(), len(x), topk_weights is not None

        def receive(view: View, options: RecvOptions) -> Received:
            """On the caller's stream. INDEX costs least: rows are a copy, those of other hosts once."""
            check_hints_only(options)
            # First those of all ranks: their errors name the missing rank, and end the waits of all others.
            found = inter.recv(View.INDEX)
            return self._finish_recv(intra, found, tokens, view, weighted=weighted)

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
        """As the Protocol says. Tensors may be overwritten by the caller's stream once it returns."""
        self.inter.check_stream()
        handle: Handle[JoinedReceive] = handle_of(received, self)
        mode, state = combine_mode(self.spec, reduction, wire, WIRES), handle.state
        joined, tokens = state.joined, handle.tokens
        rows = joined.order.outputs(expert_out, received.view, self.inter.shapes)
        inter_rows = rows.index_select(0, joined.inter_at)
        outgoing = self.inter.begin_combine(inter_rows, state.inter, handle, topk_weights, mode)
        with self._beside(outgoing):
            intra_rows = rows.index_select(0, joined.intra_at)
            weights = None if topk_weights is None else topk_weights.clone()  # it may read them at recv()
            intra = self.intra.combine_send(intra_rows, state.intra, weights, reduction=mode.reduction)
        sums = outgoing.send()

        def receive(out: torch.Tensor | None, wait_stats: torch.Tensor | None) -> torch.Tensor:
            if out is not None:
                self.inter.shapes.result(tokens, out)
            inter = self.inter.copy_result(sums, tokens, None, wait_stats)
            with self._named():
                here = intra.recv()
            return torch.add(here, inter, out=out)  # in float32, also of bfloat16

        return PendingCombine(receive)

    def barrier(self) -> None:
        """As the Protocol says: of the processes, not of their streams."""
        with self._named():
            self.intra.barrier()
        self.inter.barrier()

    def release(self, received: Received) -> None:
        """Does nothing: views are copies, and a receive gives its bank back."""

    def check(self) -> None:
        """Raises what a kernel inside the host has found since the last call; never waits."""
        with self._named():
            self.intra.check()

    def statistics(self) -> ExchangeStatistics:
        """Of `inter`, with what `intra` moved, waited for and received; its durations: intra.statistics()."""
        found, intra = self.inter.statistics().copy(), self.intra.statistics()
        experts = experts_of(self.spec, self.intra_ranks)
        mine = self.spec.local_experts
        here = {experts[e]: count for e, count in intra["expert_tokens"].items() if e < len(experts)}
        waited = {(op, self.intra_ranks[peer]): ns for (op, peer), ns in intra["peer_wait_ns"].items()}
        found["expert_tokens"] = {e: found["expert_tokens"].get(e, 0) + here.get(e, 0) for e in mine}
        found["peer_wait_ns"] = _added(found["peer_wait_ns"], waited)
        found["counters"] = _added(found["counters"], intra["counters"])
        return found

    def close(self) -> None:
        """As the Protocol says. Waits for the device."""
        try:
            self.intra.close()
        finally:
            self.inter.close()

    def __repr__(self) -> str:
        ranks = f"ranks {list(self.intra_ranks)} of {self.spec.num_ranks}"
        return f"HierarchicalExchange(intra={self.intra!r}, {ranks})"

    def _finish_recv(
        self, intra: PendingDispatch, inter: Received, tokens: int, view: View, *, weighted: bool
    ) -> Received:
        with self._named():
            here = intra.recv(self._intra_view)
        found = self.inter.staging.copy_received(inter, self._tables, front=entries_of(here))
        self._gather(here, found)
        joined = join(here, found, view)
        handle = Handle(self, tokens, weighted, JoinedReceive(here, inter, joined))
        return joined.order.received(found.rows, view, self.inter.shapes, handle)

    def _gather(self, intra: Received, found: ReceivedRows) -> None:
        """Copies intra rows in front of the others; gives the bank back."""
        count = entries_of(intra)
        regions = [intra.rows] if intra.scales is None else [intra.rows, intra.scales]
        for region, rows in zip(regions, found.rows, strict=True):
            if intra.row_ids is None:
                as_bytes(rows[:count]).copy_(as_bytes(region))
            else:
                torch.index_select(as_bytes(region), 0, intra.row_ids, out=as_bytes(rows[:count]))
        self.intra.release(intra)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of the host's exchange name ranks of the whole group."""
        ranks = self.intra_ranks
        try:
            yield
        except PeerTimeout as e:
            raise PeerTimeout(e.op, e.phase, ranks[e.rank], ranks[e.peer], e.expected, e.seen) from e
        except (GroupAborted, ProtocolViolation) as e:
            raise type(e)(f"among ranks {ranks[0]} to {ranks[-1]}, counted from 0 there: {e}") from e

    @contextmanager
    def _beside(self, outgoing: Outgoing[Sent]) -> Iterator[None]:
        """A send inside the host while tensors travel to its memory. If it fails, nothing else is sent."""
        try:
            with self._named():
                yield
        except BaseException:
            outgoing.arrived()  # the next send writes where they arrive
            raise


def open_hierarchical(
    inter: FabricDeviceExchange,
    hosts: tuple[int, ...],
    segment_spec: Callable[[ExchangeSpec], ExchangeSpec],
    open_intra: Callable[[ExchangeSpec, int], Exchange],
    *,
    validate: bool = False,
) -> HierarchicalExchange:
    """Joins the ranks of each host. Collective over all ranks of `inter`, which is closed where this fails.

    Args:
        hosts, validate: see HierarchicalExchange.
        segment_spec: of the segment that the ranks of a host share, given the spec of their exchange.
        open_intra: this rank's end inside its host, given the spec and a descriptor of the segment, which
          stays the caller's.
    Raises: ConfigError; what open_intra raises; ExchangeError where another rank failed.
    """
    intra: Exchange | None = None
    group = inter.inner.group
    try:
        if group.on_timeout != "raise":
            allowed = "raise: a rank would be masked between hosts only"
            raise ConfigError("on_timeout", group.on_timeout, allowed)
        ranks = ranks_of_host(hosts, inter.spec)
        spec = spec_of_host(inter.spec, ranks)
        fd = share_segment(inter, inter.spec.rank, ranks, lambda: create_segment(segment_spec(spec)))
        try:
            intra = open_intra(spec, fd)
        finally:
            os.close(fd)
        inter.barrier()
        many = _MANY in inter.all_gather(_FEW if intra.normal is None else _MANY)
        exchange = HierarchicalExchange(intra, inter, hosts, many=many, validate=validate)
        inter.barrier()
    except BaseException:
        group.abort()  # the others would wait for this rank
        try:
            if intra is not None:
                intra.close()
        finally:
            inter.close()
        raise
    return exchange


def _added(one: dict[K, int], other: dict[K, int]) -> dict[K, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}
