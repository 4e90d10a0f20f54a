"""Dispatch and combine over torch.distributed collectives: slow, obvious, what every transport must equal.

Fixes the order of arithmetic, and nothing else: no slots, banks or cells are modelled. Everybody gathers all
tokens and routings, takes what its experts need, and answers with one all-to-all per combine.

    RANK    partial[t] = sum over k, ascending, of weight[t, k] * row(t, k), over the experts of one rank;
            float32, from +0, multiply then add; rounded to the combine dtype; the source sums the partials in
            rank order in float32 and rounds once more.
    SOURCE  row(t, k) returns unchanged; the source sums weight[t, k] * row(t, k) over k, ascending, in
            float32 and rounds once.

The send halves block until every peer has sent too, since a collective is what carries them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ep_server.errors import HookNotCalled, InvalidArgument
from ep_server.exchange.api import (
    Capabilities,
    ExchangeSpec,
    ExchangeStatistics,
    Payload,
    Received,
    Reduction,
    View,
)
from ep_server.exchange.geometry import RECORD_BYTES, check_spec
from ep_server.exchange.quant import FP8_PAYLOADS, quantise, scale_columns, scale_dtype
from ep_server.exchange.validate import check_expert_out, check_tokens, check_weights, input_dtype
from ep_server.testing.packing import entries_of, pad_rows, slots_of


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What a rank knows after a dispatch; the handle of Received.

    ids: [R, max_tokens, K] int64, -1 where nothing was routed. weights: [R, max_tokens, K] float32 or None.
    entries: [N, 4] int64, (local expert, source rank, source token, k) of each received row, in row order.
    num_tokens: T of this rank's own call.
    """

    ids: torch.Tensor
    weights: torch.Tensor | None
    entries: torch.Tensor
    num_tokens: int


class ReferenceExchange:
    """The Exchange Protocol over a torch.distributed group; without one for a single rank.

    Args:
        spec: see ExchangeSpec; spec.rank must be the caller's rank in `group`.
        group: gloo process group of spec.num_ranks ranks, or None when num_ranks is 1.
    """

    def __init__(self, spec: ExchangeSpec, group: dist.ProcessGroup | None = None) -> None:
        check_spec(spec)
        if group is None and spec.num_ranks != 1:
            raise InvalidArgument("group", None, f"a process group of {spec.num_ranks} ranks")
        if group is not None and (group.size(), group.rank()) != (spec.num_ranks, spec.rank):
            raise InvalidArgument("group", group, f"rank {spec.rank} of {spec.num_ranks}")
        self.spec = spec
        self._group = group
        self._dispatches: deque[ReferenceDispatch] = deque(maxlen=spec.num_banks)
        self._combines: deque[ReferenceCombine] = deque(maxlen=spec.num_banks)
        self.membership = self.fused = None
        self.capabilities = Capabilities(
            payloads=frozenset(Payload),
            views=frozenset(View),
            cheapest_view=View.COMPACT,
            graph_safe=False,
            micro_batches=spec.num_banks,
            memory_bytes=0,
        )

    def dispatch_send(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> ReferenceDispatch:
        """See Exchange.dispatch_send. Blocks until every rank has called it."""
        check_tokens(self.spec, x, topk_ids, topk_weights)
        self._check_bank(self._dispatches, "dispatch")
        pending = ReferenceDispatch(self, x, topk_ids, topk_weights)
        self._dispatches.append(pending)
        return pending

    def combine_send(
        self, expert_out: torch.Tensor, received: Received, topk_weights: torch.Tensor | None = None
    ) -> ReferenceCombine:
        """See Exchange.combine_send. Blocks until every rank has called it."""
        dispatched = received.handle
        if not isinstance(dispatched, Dispatched):
            raise InvalidArgument("received.handle", dispatched, "made by this exchange")
        check_expert_out(self.spec, expert_out, received)
        weights = _own_weights(self.spec, dispatched, topk_weights)
        self._check_bank(self._combines, "combine")
        pending = ReferenceCombine(self, _compact(expert_out, received, dispatched), dispatched, weights)
        self._combines.append(pending)
        return pending

    def all_gather(self, record: bytes) -> list[bytes]:
        """See Exchange.all_gather."""
        if len(record) > RECORD_BYTES:
            raise InvalidArgument("record", len(record), f"at most {RECORD_BYTES} bytes")
        cell = bytes([len(record)]) + record.ljust(RECORD_BYTES, b"\0")
        gathered = self.gather(torch.frombuffer(bytearray(cell), dtype=torch.uint8))
        return [bytes(row[1 : 1 + row[0]]) for row in gathered.tolist()]

    def barrier(self) -> None:
        """See Exchange.barrier."""
        if self._group is not None:
            dist.barrier(self._group)

    def release(self, received: Received) -> None:
        """Does nothing: every view is a copy."""

    def check(self) -> None:
        """Does nothing: the call that finds a failure raises it."""

    def statistics(self) -> ExchangeStatistics:
        """Nothing is measured."""
        return {"histograms": {}, "sums": {}, "counters": {}, "peer_wait_ns": {}, "expert_tokens": {}}

    def close(self) -> None:
        """Drops pending operations; the process group stays its owner's."""
        self._dispatches.clear()
        self._combines.clear()

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Equal tensors of all ranks, stacked in rank order: [R, *mine.shape]."""
        if self._group is None:
            return mine.unsqueeze(0)
        parts = [torch.empty_like(mine) for _ in range(self.spec.num_ranks)]
        dist.all_gather(parts, mine.contiguous(), group=self._group)
        return torch.stack(parts)

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """rows[p] goes to rank p; returns what each rank had for this one, in rank order. Same shape."""
        if self._group is None:
            return rows
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows.contiguous(), group=self._group)
        return received

    def _check_bank(self, operations: deque[ReferenceDispatch] | deque[ReferenceCombine], op: str) -> None:
        if len(operations) == operations.maxlen and not operations[0].received:
            raise HookNotCalled(f"the {op} {operations.maxlen} operations ago has not been received")


class ReferenceDispatch:
    """A dispatch under way: everything has been gathered, nothing handed out."""

    def __init__(
        self, exchange: ReferenceExchange, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None
    ) -> None:
        spec = exchange.spec
        self.received = False
        self._spec, self._num_tokens = spec, len(x)
        self._ids = exchange.gather(pad_rows(ids, spec.max_tokens, -1))
        self._weights = None if weights is None else exchange.gather(pad_rows(weights, spec.max_tokens, 0))
        if spec.payload in FP8_PAYLOADS:
            codes, scales = quantise(x, spec.payload)
            codes = exchange.gather(pad_rows(codes.view(torch.uint8), spec.max_tokens, 0))
            self._rows = codes.view(torch.float8_e4m3fn)
            self._scales: torch.Tensor | None = exchange.gather(pad_rows(scales, spec.max_tokens, 0))
        else:
            self._rows, self._scales = exchange.gather(pad_rows(x, spec.max_tokens, 0)), None

    def recv(self, view: View = View.COMPACT) -> Received:
        """See PendingDispatch.recv."""
        if self.received:
            raise InvalidArgument("dispatch", "received", "received once")
        self.received = True
        spec = self._spec
        entries = entries_of(self._ids, spec.local_experts)
        per_expert = torch.bincount(entries[:, 0], minlength=len(spec.local_experts))
        offsets = torch.cat([per_expert.new_zeros(1), per_expert.cumsum(0)])
        source = entries[:, 1] * spec.max_tokens + entries[:, 2]
        flat = self._rows.flatten(0, 1)
        scales = None if self._scales is None else self._scales.flatten(0, 1)
        row_ids = None
        if view is View.COMPACT:
            flat, scales = flat[source], None if scales is None else scales[source]
        elif view is View.PADDED:
            flat, scales = self._padded(flat[source], None if scales is None else scales[source], entries)
        else:
            row_ids = source
        return Received(
            rows=flat,
            counts=per_expert.to(torch.int32),
            offsets=offsets,
            handle=Dispatched(self._ids, self._weights, entries, self._num_tokens),
            view=view,
            scales=scales,
            row_ids=row_ids,
        )

    def _padded(
        self, rows: torch.Tensor, scales: torch.Tensor | None, entries: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        spec = self._spec
        experts, capacity = len(spec.local_experts), spec.num_ranks * spec.max_tokens
        slots = slots_of(entries, experts, capacity)
        padded = torch.full((experts * capacity, spec.hidden), torch.nan).to(rows.dtype)
        padded[slots] = rows
        padded = padded.view(experts, capacity, spec.hidden)
        if scales is None:
            return padded, None
        columns, pitch = scale_columns(spec.hidden, spec.payload), -(-capacity // 4) * 4
        plane = torch.zeros(experts, columns, pitch, dtype=scale_dtype(spec.payload))
        column_major = plane.transpose(1, 2)[:, :capacity]
        column_major[slots // capacity, slots % capacity] = scales
        return padded, column_major


class ReferenceCombine:
    """A combine under way: the rows of all ranks have arrived, nothing is summed at the source yet."""

    def __init__(
        self, exchange: ReferenceExchange, rows: torch.Tensor, dispatched: Dispatched, weights: torch.Tensor
    ) -> None:
        spec = exchange.spec
        self.received = False
        self._spec, self._dispatched, self._weights = spec, dispatched, weights
        _, source, token, choice = dispatched.entries.unbind(1)
        if spec.reduction is Reduction.SOURCE:
            answers = torch.zeros(*dispatched.ids.shape, spec.hidden, dtype=input_dtype(spec))
            answers[source, token, choice] = rows
        else:
            assert dispatched.weights is not None
            sums = torch.zeros(*dispatched.ids.shape[:2], spec.hidden)
            for k in range(spec.top_k):
                mine = choice == k
                at = source[mine], token[mine]
                sums[at] = sums[at] + dispatched.weights[at][:, k, None] * rows[mine].float()
            answers = sums.to(input_dtype(spec))
        self._answers = exchange.all_to_all(answers)

    def recv(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """See PendingCombine.recv."""
        spec, count = self._spec, self._dispatched.num_tokens
        shape, dtype = (count, spec.hidden), input_dtype(spec)
        if out is not None and (tuple(out.shape) != shape or out.dtype != dtype):
            raise InvalidArgument("out", (tuple(out.shape), out.dtype), f"{shape} {dtype}")
        if self.received:
            raise InvalidArgument("combine", "received", "received once")
        self.received = True
        total = torch.zeros(shape)
        if spec.reduction is Reduction.SOURCE:
            ids = self._dispatched.ids[spec.rank, :count]
            owners = torch.tensor(spec.placement)[ids]  # -1 reads the last owner; masked below
            for k in range(spec.top_k):
                tokens = (ids[:, k] >= 0).nonzero().squeeze(1)
                rows = self._answers[owners[tokens, k], tokens, k].float()
                total[tokens] = total[tokens] + self._weights[tokens, k, None] * rows
        else:
            for partial in self._answers[:, :count]:
                total = total + partial.float()
        result = total.to(dtype)
        return result if out is None else out.copy_(result)


def _own_weights(spec: ExchangeSpec, dispatched: Dispatched, given: torch.Tensor | None) -> torch.Tensor:
    """[T, K] weights of this rank's own tokens, from dispatch or, if it had none, from combine."""
    if given is not None:
        if dispatched.weights is not None:
            raise InvalidArgument("topk_weights", "given twice", "given at dispatch or at combine, not both")
        check_weights(given, (dispatched.num_tokens, spec.top_k))
        return given
    if dispatched.weights is None:
        raise InvalidArgument("topk_weights", None, "given at combine, since dispatch had none")
    return dispatched.weights[spec.rank, : dispatched.num_tokens]


def _compact(expert_out: torch.Tensor, received: Received, dispatched: Dispatched) -> torch.Tensor:
    """[N, H] answers in entry order, whatever the view."""
    if received.view is not View.PADDED:
        return expert_out
    experts, capacity = expert_out.shape[:2]
    return expert_out.flatten(0, 1)[slots_of(dispatched.entries, experts, capacity)]
