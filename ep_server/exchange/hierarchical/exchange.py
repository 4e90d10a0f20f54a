"""The exchange of GPUs of several hosts: NVLink inside a host, host memory and the network between hosts.

It has two parts. `intra`, the exchange of one host's ranks, carries tokens whose experts are on their own
host. `inter`, a FabricDeviceExchange of all ranks, carries the others. Both send before either is waited for,
so the network works while GPUs write to one another. What came through both is put side by side in one view,
in the order of the Protocol: that costs one more pass over the intra rows, and one over the experts' answers.

Sums: intra ranks in their order, rounded to the combine dtype; inter ranks likewise; both added in float32
and rounded. With reduction source the same over choices. One host rounds once: so a result may differ from
one host's by the rounding of the two parts, and is the same to the bit where a token has answers of at most
one rank (or choice) in each part, as in groups of two hosts of one rank. It never depends on times.

Nobody is masked: a peer that is late ends the group. `inter` waits for every rank, and tells all others.
Beyond the Protocol: check(), statistics(), memory_bytes; `intra` and `inter`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from ep_server.errors import ConfigError, GroupAborted, InvalidArgument, PeerTimeout, ProtocolViolation
from ep_server.exchange.api import (
    Capabilities,
    Exchange,
    ExchangeStatistics,
    PendingCombine,
    PendingDispatch,
    Received,
    Reduction,
    View,
)
from ep_server.exchange.fabric.device import FabricDeviceExchange, checked_view
from ep_server.exchange.fabric.device import PendingCombine as InterCombine
from ep_server.exchange.fabric.device import PendingDispatch as InterDispatch
from ep_server.exchange.fabric.host_staging import Answers, Brought, Outgoing, Sent, Wanted
from ep_server.exchange.hierarchical.host_part import (
    IdSplit,
    InterTables,
    Joined,
    experts_of,
    join,
    ranks_of_host,
    spec_of_host,
)
from ep_server.exchange.row_order import as_bytes
from ep_server.exchange.validate import check_tensor_on, check_tokens


class IntraExchange(Exchange, Protocol):
    """The exchange inside a host: a NvlinkExchange, or one that does the same on other tensors."""

    def combine_send(
        self,
        expert_out: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        *,
        reduction: Reduction | None = None,
    ) -> PendingCombine:
        """As NvlinkExchange has it."""
        ...


@dataclass(frozen=True, slots=True)
class Handle:
    """What combine_send needs. intra, inter: as the two exchanges received them. tokens: T."""

    intra: Received
    inter: Received
    joined: Joined
    tokens: int
    owner: HierarchicalExchange


class HierarchicalDispatch:
    """A dispatch whose send half has run. See exchange.PendingDispatch."""

    __slots__ = ("_exchange", "_inter", "_intra", "_tokens")

    def __init__(
        self, exchange: HierarchicalExchange, intra: PendingDispatch, inter: InterDispatch, tokens: int
    ) -> None:
        self._exchange, self._intra, self._inter, self._tokens = exchange, intra, inter, tokens

    def recv(self, view: View = View.COMPACT) -> Received:
        """As the Protocol says, on the caller's stream. INDEX costs least: rows are a copy, without repeats
        of what came from other hosts, and as many as came.
        """
        view = checked_view(view)
        # First those of all ranks: who is missing is named, and told, as between hosts.
        inter = self._inter.inner.recv(View.INDEX)
        return self._exchange.finish_recv(self._intra, inter, self._tokens, view)

    @property
    def wait_ns(self) -> torch.Tensor:
        """[R] int64 on the CPU: how long recv() waited for each source's header."""
        return self._inter.wait_ns


class HierarchicalCombine:
    """A combine whose send half has run. See exchange.PendingCombine."""

    __slots__ = ("_exchange", "_inter", "_intra", "_tokens")

    def __init__(
        self, exchange: HierarchicalExchange, intra: PendingCombine, inter: InterCombine, tokens: int
    ) -> None:
        self._exchange, self._intra, self._inter, self._tokens = exchange, intra, inter, tokens

    def recv(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """As the Protocol says, on the caller's stream."""
        exchange, form = self._exchange, self._exchange.inter.form
        if out is not None:
            check_tensor_on(form.device, "out", out, form.dtype, T=self._tokens, H=form.hidden)
        inter = self._inter.recv()
        with exchange.named():
            intra = self._intra.recv()
        return torch.add(intra, inter, out=out)  # in float32, also of bfloat16

    @property
    def wait_ns(self) -> torch.Tensor:
        """[R] int64 on the CPU: how long recv() waited for each rank's header."""
        return self._inter.wait_ns


K = TypeVar("K")


class HierarchicalExchange:
    """One rank's end of a group. Satisfies exchange.Exchange on tensors of inter's device.

    Args:
        intra: of this host's ranks, with the spec of host_part.spec_of_host; owned by this one from now on.
        inter: of all ranks; owned likewise.
        hosts: [R] number of each rank's host; the ranks of a host follow one another.
        validate: reads ids and checks them before anything is sent; else a bad id is refused by the part that
          gets it, when the other may have sent. For tests: it waits for the device.
    Raises: ConfigError.
    """

    def __init__(
        self,
        intra: IntraExchange,
        inter: FabricDeviceExchange,
        hosts: tuple[int, ...],
        *,
        validate: bool = False,
    ) -> None:
        spec = inter.spec
        self.intra_ranks = ranks_of_host(hosts, spec)
        if intra.spec != spec_of_host(spec, self.intra_ranks):
            raise ConfigError(
                "intra.spec", intra.spec, f"that of ranks {list(self.intra_ranks)} of inter.spec"
            )
        self.spec, self.intra, self.inter, self._validate = spec, intra, inter, validate
        self.membership = self.fused = None  # a rank that is late ends the group
        self.combine_dtype = inter.combine_dtype
        self._split = IdSplit(spec, self.intra_ranks, inter.device)
        self._tables = InterTables(spec, self.intra_ranks)

    # -- the Protocol ---------------------------------------------------------------------------------

    def dispatch_send(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> HierarchicalDispatch:
        """As the Protocol says. Waits for the caller's stream. Tensors must not change before the stream has
        passed this point.
        """
        self.inter.check_stream()
        tokens = self.inter.check_tokens(x, topk_ids, topk_weights)
        if topk_weights is None and self.spec.reduction is Reduction.RANK:
            raise InvalidArgument("topk_weights", None, "given at dispatch for reduction rank")
        if self._validate:
            weights = None if topk_weights is None else topk_weights.cpu()
            check_tokens(self.spec, x.cpu(), topk_ids.cpu(), weights)
        intra_ids, inter_ids = self._split(topk_ids)
        outgoing = self.inter.begin_dispatch(x, inter_ids, topk_weights)
        with self._beside(outgoing):
            intra = self.intra.dispatch_send(x, intra_ids, topk_weights)
        return HierarchicalDispatch(self, intra, outgoing.send(), tokens)

    def combine_send(
        self,
        expert_out: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        *,
        reduction: Reduction | None = None,
    ) -> HierarchicalCombine:
        """As the Protocol says. Tensors may be overwritten by the caller's stream once it returns.

        Args:
            reduction: see ShmExchange.combine_send.
        """
        self.inter.check_stream()
        handle = received.handle
        if not isinstance(handle, Handle) or handle.owner is not self:
            raise InvalidArgument("received.handle", handle, "of a dispatch of this exchange")
        rows = handle.joined.order.answers(expert_out, received.view, self.inter.form)
        inter_rows = rows.index_select(0, handle.joined.inter_at)
        outgoing = self.inter.begin_combine(
            Answers(inter_rows, handle.inter, handle.tokens, topk_weights, reduction)
        )
        with self._beside(outgoing):
            intra_rows = rows.index_select(0, handle.joined.intra_at)
            weights = None if topk_weights is None else topk_weights.clone()  # it may read them at recv()
            intra = self.intra.combine_send(intra_rows, handle.intra, weights, reduction=reduction)
        return HierarchicalCombine(self, intra, outgoing.send(), handle.tokens)

    def all_gather(self, record: bytes) -> list[bytes]:
        """As the Protocol says."""
        return self.inter.all_gather(record)

    def barrier(self) -> None:
        """As the Protocol says: of the processes, not of their streams."""
        with self.named():
            self.intra.barrier()
        self.inter.barrier()

    def close(self) -> None:
        """As the Protocol says. Waits for the device."""
        try:
            self.intra.close()
        finally:
            self.inter.close()

    def release(self, received: Received) -> None:
        """Without effect: what a view shows is a copy, its bank was given back when it was received."""

    # -- failure, measurement -------------------------------------------------------------------------

    def check(self) -> None:
        """Raises what a kernel inside the host has found since; never waits."""
        with self.named():
            self.intra.check()

    @contextmanager
    def named(self) -> Iterator[None]:
        """What the host's exchange raises names ranks of the whole group."""
        ranks = self.intra_ranks
        try:
            yield
        except PeerTimeout as e:
            raise PeerTimeout(e.op, e.phase, ranks[e.rank], ranks[e.peer], e.expected, e.seen) from e
        except (GroupAborted, ProtocolViolation) as e:
            raise type(e)(f"among ranks {ranks[0]} to {ranks[-1]}, counted from 0 there: {e}") from e

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

    @property
    def memory_bytes(self) -> int:
        """Of both ends of this rank."""
        return self.intra.capabilities.memory_bytes + self.inter.memory_bytes

    @property
    def capabilities(self) -> Capabilities:
        """As the Protocol says. INDEX copies least: the other views are made of it."""
        return Capabilities(
            payloads=self.intra.capabilities.payloads & self.inter.capabilities.payloads,
            views=frozenset(View),
            cheapest_view=View.INDEX,
            graph_safe=False,
            micro_batches=self.spec.num_banks,
            memory_bytes=self.memory_bytes,
        )

    def __repr__(self) -> str:
        ranks = f"ranks {list(self.intra_ranks)} of {self.spec.num_ranks}"
        return f"HierarchicalExchange(intra={self.intra!r}, {ranks})"

    # -- inside ---------------------------------------------------------------------------------------

    def finish_recv(self, intra: PendingDispatch, inter: Received, tokens: int, view: View) -> Received:
        """The second half of a dispatch. inter: received in place on the host."""
        with self.named():
            here = intra.recv(View.INDEX)
        assert here.row_ids is not None
        brought = self.inter.bring(inter, Wanted(self._tables, front=len(here.row_ids)))
        self._gather(here, brought)
        joined = join(here, brought, view)
        handle = Handle(here, inter, joined, tokens, self)
        return joined.order.received(brought.made, view, self.inter.form.capacity, handle)

    def _gather(self, intra: Received, brought: Brought) -> None:
        """IntraExchange rows in front of those that were brought; gives the bank back."""
        assert intra.row_ids is not None
        count = len(intra.row_ids)
        regions = [intra.rows] if intra.scales is None else [intra.rows, intra.scales]
        for region, made in zip(regions, brought.made, strict=True):
            torch.index_select(as_bytes(region), 0, intra.row_ids, out=as_bytes(made[:count]))
        self.intra.release(intra)

    @contextmanager
    def _beside(self, outgoing: Outgoing[Sent]) -> Iterator[None]:
        """A send inside the host while tensors travel to its memory; if it fails, nothing else is sent."""
        try:
            with self.named():
                yield
        except BaseException:
            outgoing.arrived()  # the next send writes where they arrive
            raise


def _added(one: dict[K, int], other: dict[K, int]) -> dict[K, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}
