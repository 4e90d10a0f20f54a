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
from ep_server.exchange.quant import quantise, scale_columns, scale_dtype
from ep_server.exchange.shapes import Shapes
from ep_server.exchange.spec import FP8, RECORD_BYTES, check_spec
from ep_server.exchange.validate import (
    CPU,
    check_combine_weights,
    check_dispatch,
    check_hints_only,
    check_ids,
    combine_mode,
    handle_of,
    input_dtype,
)
from ep_server.testing.packing import entries_of, pad_rows, slots_of


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What a rank has after a dispatch; state of its Handle.

    ids: [R, max_tokens, K] int64, -1 where nothing was routed. weights: [R, max_tokens, K] float32 or None.
    entries: [N, 4] int64, (local expert, source rank, source token, k) of each received row, in row order.
    """

    ids: torch.Tensor
    weights: torch.Tensor | None
    entries: torch.Tensor


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
        self.spec, self.shapes = spec, Shapes(spec)
        self._group = group
        self._dispatches: deque[PendingDispatch] = deque(maxlen=spec.num_banks)
        self._combines: deque[PendingCombine] = deque(maxlen=spec.num_banks)
        self.empty_padded = self.shapes.padded
        self.membership = self.fused = self.normal = None
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
    ) -> PendingDispatch:
        """See Exchange.dispatch_send. Blocks until every rank has called it."""
        check_dispatch(self.spec, CPU, x, topk_ids, topk_weights)
        check_ids(self.spec, topk_ids)
        self._check_bank(self._dispatches, "dispatch")
        pending = PendingDispatch(ReferenceDispatch(self, x, topk_ids, topk_weights).receive)
        self._dispatches.append(pending)
        return pending

    def combine_send(
        self,
        expert_out: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        *,
        reduction: Reduction | None = None,
        wire: Wire = Wire.BF16,
    ) -> PendingCombine:
        """See Exchange.combine_send, with the spec's reduction. Blocks until every rank has called it."""
        handle: Handle[Dispatched] = handle_of(received, self)
        mode = combine_mode(self.spec, reduction, wire, self.capabilities.wires)
        if mode.reduction is not self.spec.reduction:
            raise InvalidArgument("reduction", str(mode.reduction), f"{self.spec.reduction}, the spec's")
        self.shapes.check_outputs(expert_out, received.view, len(handle.state.entries))
        check_combine_weights(self.spec, CPU, handle, topk_weights, mode.reduction)
        self._check_bank(self._combines, "combine")
        rows = _compact(expert_out, received, handle.state)
        pending = PendingCombine(ReferenceCombine(self, rows, handle, topk_weights).receive)
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

    def _check_bank(self, operations: deque[PendingDispatch] | deque[PendingCombine], op: str) -> None:
        if len(operations) == operations.maxlen and not operations[0].received:
            raise HookNotCalled(f"the {op} {operations.maxlen} operations ago has not been received")


class ReferenceDispatch:
    """A dispatch under way: everything has been gathered, nothing handed out."""

    def __init__(
        self, exchange: ReferenceExchange, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None
    ) -> None:
        spec = exchange.spec
        self._exchange, self._spec, self._num_tokens = exchange, spec, len(x)
        self._ids = exchange.gather(pad_rows(ids, spec.max_tokens, -1))
        self._weights = None if weights is None else exchange.gather(pad_rows(weights, spec.max_tokens, 0))
        if spec.payload in FP8:
            codes, scales = quantise(x, spec.payload)
            codes = exchange.gather(pad_rows(codes.view(torch.uint8), spec.max_tokens, 0))
            self._rows = codes.view(torch.float8_e4m3fn)
            self._scales: torch.Tensor | None = exchange.gather(pad_rows(scales, spec.max_tokens, 0))
        else:
            self._rows, self._scales = exchange.gather(pad_rows(x, spec.max_tokens, 0)), None

    def receive(self, view: View, options: RecvOptions) -> Received:
        """See PendingDispatch.recv."""
        check_hints_only(options)
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
            handle=Handle(
                self._exchange,
                self._num_tokens,
                self._weights is not None,
                Dispatched(self._ids, self._weights, entries),
            ),
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
        self,
        exchange: ReferenceExchange,
        rows: torch.Tensor,
        handle: Handle[Dispatched],
        weights: torch.Tensor | None,
    ) -> None:
        self._exchange, self._handle, spec, dispatched = exchange, handle, exchange.spec, handle.state
        if dispatched.weights is not None:
            weights = dispatched.weights[spec.rank, : handle.tokens]
        self._weights = rows.new_empty(0, spec.top_k) if weights is None else weights
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

    def receive(self, out: torch.Tensor | None, wait_stats: torch.Tensor | None) -> torch.Tensor:
        """See PendingCombine.recv."""
        check_hints_only({"wait_stats": wait_stats})
        spec, count, dispatched = self._exchange.spec, self._handle.tokens, self._handle.state
        result = self._exchange.shapes.result(count, out)
        total = torch.zeros(count, spec.hidden)
        if spec.reduction is Reduction.SOURCE:
            ids = dispatched.ids[spec.rank, :count]
            owners = torch.tensor(spec.placement)[ids]  # -1 reads the last owner; masked below
            for k in range(spec.top_k):
                tokens = (ids[:, k] >= 0).nonzero().squeeze(1)
                rows = self._answers[owners[tokens, k], tokens, k].float()
                total[tokens] = total[tokens] + self._weights[tokens, k, None] * rows
        else:
            for partial in self._answers[:, :count]:
                total = total + partial.float()
        return result.copy_(total)


def _compact(expert_out: torch.Tensor, received: Received, dispatched: Dispatched) -> torch.Tensor:
    """[N, H] answers in entry order, whatever the view."""
    if received.view is not View.PADDED:
        return expert_out
    experts, capacity = expert_out.shape[:2]
    return expert_out.flatten(0, 1)[slots_of(dispatched.entries, experts, capacity)]
