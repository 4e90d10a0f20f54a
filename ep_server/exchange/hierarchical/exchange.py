"""The exchange of GPUs of several hosts: NVLink inside a host, host memory and the network between hosts.

Composed of two: `near`, the exchange of one host's ranks, carries tokens whose experts are on their own host;
`far`, a BounceExchange of all ranks, carries the others. Both have sent before either is waited for, so the
network works while GPUs write to one another. What came through both is put side by side in one view, in the
order of the Protocol: that costs one more pass over the near rows, and one over the experts' answers.

Sums: near ranks in their order, rounded to the combine dtype; far ranks likewise; both added in float32 and
rounded. With reduction source the same over choices. One host rounds once: so a result may differ from one
host's by the rounding of the two parts, and is the same to the bit where a token has answers of at most one
rank (or choice) in each part, as in groups of two hosts of one rank. It never depends on times.

Nobody is masked: a peer that is late ends the group. `far` waits for every rank, and tells all others.
Beyond the Protocol: check(), statistics(), memory_bytes; `near` and `far`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ep_server.errors import ConfigError, GroupAborted, InvalidArgument, PeerTimeout, ProtocolViolation
from ep_server.exchange.api import PendingDispatch, Received, Reduction, View
from ep_server.exchange.fabric.host_buffers import Brought, Wanted
from ep_server.exchange.fabric.host_pending import Answers, Outgoing, Sent
from ep_server.exchange.fabric.host_staging import BounceExchange
from ep_server.exchange.hierarchical.host_part import (
    FarTables,
    IdSplit,
    experts_of,
    join,
    ranks_of_host,
    spec_of_host,
)
from ep_server.exchange.hierarchical.pending import Handle, HybridCombine, HybridDispatch, Near
from ep_server.exchange.row_order import as_bytes
from ep_server.exchange.validate import check_tokens


class HybridExchange:
    """One rank's end of a group. Satisfies exchange.Exchange on tensors of far's device.

    Args:
        near: of this host's ranks, with the spec of host_part.spec_of_host; owned by this one from now on.
        far: of all ranks; owned likewise.
        hosts: [R] number of each rank's host; the ranks of a host follow one another.
        validate: reads ids and checks them before anything is sent; else a bad id is refused by the part that
          gets it, when the other may have sent. For tests: it waits for the device.
    Raises: ConfigError.
    """

    def __init__(
        self, near: Near, far: BounceExchange, hosts: tuple[int, ...], *, validate: bool = False
    ) -> None:
        spec = far.spec
        self.near_ranks = ranks_of_host(hosts, spec)
        if near.spec != spec_of_host(spec, self.near_ranks):
            raise ConfigError("near.spec", near.spec, f"that of ranks {list(self.near_ranks)} of far.spec")
        self.spec, self.near, self.far, self._validate = spec, near, far, validate
        self.combine_dtype = far.combine_dtype
        self._split = IdSplit(spec, self.near_ranks, far.device)
        self._tables = FarTables(spec, self.near_ranks)

    # -- the Protocol ---------------------------------------------------------------------------------

    def dispatch_send(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> HybridDispatch:
        """As the Protocol says. Waits for the caller's stream. Tensors must not change before the stream has
        passed this point.
        """
        self.far.check_stream()
        tokens = self.far.check_tokens(x, topk_ids, topk_weights)
        if topk_weights is None and self.spec.reduction is Reduction.RANK:
            raise InvalidArgument("topk_weights", None, "given at dispatch for reduction rank")
        if self._validate:
            weights = None if topk_weights is None else topk_weights.cpu()
            check_tokens(self.spec, x.cpu(), topk_ids.cpu(), weights)
        near_ids, far_ids = self._split(topk_ids)
        outgoing = self.far.begin_dispatch(x, far_ids, topk_weights)
        with self._beside(outgoing):
            near = self.near.dispatch_send(x, near_ids, topk_weights)
        return HybridDispatch(self, near, outgoing.send(), tokens)

    def combine_send(
        self,
        expert_out: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        *,
        reduction: Reduction | None = None,
    ) -> HybridCombine:
        """As the Protocol says. Tensors may be overwritten by the caller's stream once it returns.

        Args:
            reduction: see NativeExchange.combine_send.
        """
        self.far.check_stream()
        handle = received.handle
        if not isinstance(handle, Handle) or handle.owner is not self:
            raise InvalidArgument("received.handle", handle, "of a dispatch of this exchange")
        rows = handle.joined.order.answers(expert_out, received.view, self.far.form)
        far_rows = rows.index_select(0, handle.joined.far_at)
        outgoing = self.far.begin_combine(
            Answers(far_rows, handle.far, handle.tokens, topk_weights, reduction)
        )
        with self._beside(outgoing):
            near_rows = rows.index_select(0, handle.joined.near_at)
            weights = None if topk_weights is None else topk_weights.clone()  # it may read them at recv()
            near = self.near.combine_send(near_rows, handle.near, weights, reduction=reduction)
        return HybridCombine(self, near, outgoing.send(), handle.tokens)

    def all_gather(self, record: bytes) -> list[bytes]:
        """As the Protocol says."""
        return self.far.all_gather(record)

    def barrier(self) -> None:
        """As the Protocol says: of the processes, not of their streams."""
        with self.named():
            self.near.barrier()
        self.far.barrier()

    def close(self) -> None:
        """As the Protocol says. Waits for the device."""
        try:
            self.near.close()
        finally:
            self.far.close()

    def release(self, received: Received) -> None:
        """Without effect: what a view shows is a copy, its bank was given back when it was received."""

    # -- failure, measurement -------------------------------------------------------------------------

    def check(self) -> None:
        """Raises what a kernel inside the host has found since; never waits."""
        if check := getattr(self.near, "check", None):
            with self.named():
                check()

    @contextmanager
    def named(self) -> Iterator[None]:
        """What the host's exchange raises names ranks of the whole group."""
        ranks = self.near_ranks
        try:
            yield
        except PeerTimeout as e:
            raise PeerTimeout(e.op, e.phase, ranks[e.rank], ranks[e.peer], e.expected, e.seen) from e
        except (GroupAborted, ProtocolViolation) as e:
            raise type(e)(f"among ranks {ranks[0]} to {ranks[-1]}, counted from 0 there: {e}") from e

    def statistics(self) -> dict[str, Any]:
        """Of `far`, with what `near` moved, waited for and received; its durations: near.statistics()."""
        found, near = dict(self.far.statistics()), self.near.statistics()
        experts = experts_of(self.spec, self.near_ranks)
        mine = self.spec.local_experts
        here = {experts[e]: count for e, count in near["expert_tokens"].items() if e < len(experts)}
        waited = {(op, self.near_ranks[peer]): ns for (op, peer), ns in near["peer_wait_ns"].items()}
        found["expert_tokens"] = {e: found["expert_tokens"].get(e, 0) + here.get(e, 0) for e in mine}
        found["peer_wait_ns"] = _added(found["peer_wait_ns"], waited)
        found["counters"] = _added(found["counters"], near["counters"])
        return found

    @property
    def memory_bytes(self) -> int:
        """Device memory of both ends of this rank; 0 where they have none."""
        return int(getattr(self.near, "memory_bytes", 0)) + self.far.memory_bytes

    def __repr__(self) -> str:
        return f"HybridExchange(near={self.near!r}, ranks {list(self.near_ranks)} of {self.spec.num_ranks})"

    # -- inside ---------------------------------------------------------------------------------------

    def land(self, near: PendingDispatch, far: Received, tokens: int, view: View) -> Received:
        """The second half of a dispatch. far: received in place on the host."""
        with self.named():
            here = near.recv(View.INDEX)
        assert here.row_ids is not None
        brought = self.far.bring(far, Wanted(self._tables, front=len(here.row_ids)))
        self._gather(here, brought)
        joined = join(here, brought, view)
        handle = Handle(here, far, joined, tokens, self)
        return joined.order.received(brought.made, view, self.far.form.capacity, handle)

    def _gather(self, near: Received, brought: Brought) -> None:
        """Near rows in front of those that were brought; gives the bank back."""
        assert near.row_ids is not None
        count = len(near.row_ids)
        regions = [near.rows] if near.scales is None else [near.rows, near.scales]
        for region, made in zip(regions, brought.made, strict=True):
            torch.index_select(as_bytes(region), 0, near.row_ids, out=as_bytes(made[:count]))
        self.near.release(near)

    @contextmanager
    def _beside(self, outgoing: Outgoing[Sent]) -> Iterator[None]:
        """A send inside the host while tensors travel to its memory; if it fails, nothing else is sent."""
        try:
            with self.named():
                yield
        except BaseException:
            outgoing.arrived()  # the next send writes where they arrive
            raise


def _added(one: dict[Any, int], other: dict[Any, int]) -> dict[Any, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}
