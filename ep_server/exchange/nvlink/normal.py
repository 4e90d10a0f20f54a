"""The exchange of many rows in a step, over NVLink: the kernels of NvlinkBulk, and those around them.

Beside the slots of the exchange for few rows, every rank's region has a heap: a block where rows come in
and one where they return. One operation at a time uses them, so nothing is allocated there. Nothing waits for
the host, so operations can be captured in a graph.

    dispatch   route -> plan -> rows travel -> order by expert     combine   sum by row -> rows return

A combine sums as the one for few rows does, so results have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ep_server import _cuda
from ep_server.errors import InvalidArgument
from ep_server.exchange.api import (
    Capabilities,
    Exchange,
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
from ep_server.exchange.bulk import Arrival, Plan, Returned, Rows
from ep_server.exchange.nvlink import launch
from ep_server.exchange.nvlink.bulk import combine_args, dispatch_args
from ep_server.exchange.nvlink.launch import Launcher, address
from ep_server.exchange.nvlink.sizes import landing, most_experts
from ep_server.exchange.shapes import VECTOR, Tensors
from ep_server.exchange.validate import check_dispatch, combine_mode, handle_of

VIEWS = frozenset({View.INDEX, View.COMPACT})
WIRES = frozenset({Wire.BF16})


@dataclass(slots=True)
class ManyState:
    """A dispatch. arrived: the whole block. room: its rows that can be in use. capacity: of row_ids.

    places: [room, K] int32, the view's row of each choice.
    """

    plan: Plan
    arrived: Rows
    room: int = 0
    capacity: int = 0
    places: torch.Tensor | None = None


class NvlinkNormal:
    """NvlinkExchange.normal. Satisfies api.Exchange.

    Args:
        few: the exchange that it belongs to. opened: returns the launcher of that one while it is open, of a
          group with sizes.heap_bytes() for this one.
    """

    fused = normal = None

    def __init__(self, few: Exchange, opened: Callable[[], Launcher]) -> None:
        self._opened, launcher = opened, opened()
        self.spec, self.shapes = few.spec, launcher.shapes
        self.membership, self.all_gather, self.barrier = few.membership, few.all_gather, few.barrier
        self.statistics, self.check, self.close = few.statistics, few.check, few.close
        self.empty_padded = few.empty_padded
        self._device, self._stride = launcher.device, most_experts(self.spec)
        self._generation, self._owner = launcher.generation, object()
        offsets = landing(self.spec)
        memory = launch.DeviceBytes(launcher.group.heap(), (1, offsets[-1]))
        self._block = self._tensors(launch.bytes_tensor(memory, self._device)[0], offsets)
        self._returning_at = offsets[-1]
        self.capabilities = Capabilities(
            payloads=frozenset(Payload) - {Payload.FP32},
            views=VIEWS,
            cheapest_view=View.INDEX,
            graph_safe=True,
            micro_batches=1,
            memory_bytes=few.capabilities.memory_bytes,
            wires=WIRES,
        )

    def dispatch_send(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> PendingDispatch:
        """As the Protocol says; enqueues both halves. Received rows lie here until the next dispatch."""
        tokens = check_dispatch(self.spec, self.shapes.device, x, topk_ids, topk_weights)
        assert topk_weights is not None  # as reduction RANK has them
        if x.data_ptr() % VECTOR:
            raise InvalidArgument("x", "not aligned", f"at a multiple of {VECTOR} bytes")
        self._launcher.check()
        sent, in_rank = self._route(x, topk_ids, topk_weights)
        plan = self._plan(in_rank)
        args = dispatch_args(sent, plan, Arrival(self.shapes.padded_rows, self._stride), 0)
        self._group.bulk_dispatch(self._stream(), self._launcher.num_sms, args)
        handle = Handle(self._own(), tokens, weighted=True, state=ManyState(plan, self._block))
        return PendingDispatch(lambda view, options: self._order(handle, view, options))

    def combine_send(
        self,
        expert_out: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        *,
        reduction: Reduction | None = None,
        wire: Wire = Wire.BF16,
    ) -> PendingCombine:
        """As the Protocol says. The sums are computed here; both halves of their return follow in recv()."""
        handle: Handle[ManyState] = handle_of(received, self._own())
        combine_mode(self.spec, reduction, wire, WIRES)
        if topk_weights is not None:
            raise InvalidArgument("topk_weights", "a tensor", "None: this dispatch was given them")
        state = handle.state
        self.shapes.check_outputs(expert_out, received.view, state.capacity)
        self._launcher.check()
        sums = self._sum(expert_out, state)

        def receive(out: torch.Tensor | None, wait_stats: torch.Tensor | None) -> torch.Tensor:
            _refuse({"wait_stats": wait_stats})
            out = self.shapes.result(handle.tokens, out)
            returned, at = Returned(sums), self._returning_at
            args = combine_args(returned, state.plan, (out, out), at)
            self._group.bulk_combine(self._stream(), self._launcher.num_sms, args)
            return out

        return PendingCombine(receive)

    def release(self, received: Received) -> None:
        """Does nothing: the next dispatch takes the memory."""

    def __repr__(self) -> str:
        return f"NvlinkNormal(rank={self.spec.rank}/{self.spec.num_ranks}, {self.spec.payload})"

    @property
    def _launcher(self) -> Launcher:
        return self._opened()

    @property
    def _group(self) -> _cuda.Group:
        return self._launcher.group

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def _own(self) -> object:
        """The owner of current handles."""
        if self._generation is not self._launcher.generation:
            self._generation, self._owner = self._launcher.generation, object()
        return self._owner

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.shapes.device)

    def _tensors(self, memory: torch.Tensor, offsets: tuple[int, ...]) -> Rows:
        """The arrays of the landing block."""
        shapes, rows = self.shapes, self.shapes.padded_rows

        def part(begin: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
            size = rows * columns * dtype.itemsize
            return memory[begin : begin + size].view(dtype).view(rows, columns)

        scales, ids, weights, *_ = offsets
        return Rows(
            part(0, self.spec.hidden, shapes.row_dtype),
            part(scales, shapes.groups, shapes.scale_dtype) if shapes.fp8 else None,
            part(ids, self.spec.top_k, torch.int64),
            part(weights, self.spec.top_k, torch.float32),
        )

    def _route(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[Rows, torch.Tensor]:
        """The rows as they travel, with ids as their owners number them; and [T, R] where they go."""
        tokens, shapes = len(x), self.shapes
        rows, scales = (x, None) if not shapes.fp8 else shapes.compact(tokens)
        sent = Rows(rows, scales, torch.empty_like(ids), weights)
        in_rank = self._empty((tokens, self.spec.num_ranks), torch.bool)
        args = _cuda.ManyRouteArgs(
            x=x.data_ptr(),
            ids=ids.data_ptr(),
            in_rank=in_rank.data_ptr(),
            placed=address(sent.ids),
            codes=rows.data_ptr() if shapes.fp8 else 0,
            scales=address(scales),
            tokens=tokens,
            stride=self._stride,
        )
        self._group.many_route(self._stream(), self._launcher.num_sms, args)
        return sent, in_rank

    def _plan(self, in_rank: torch.Tensor) -> Plan:
        tokens, ranks = in_rank.shape
        plan = Plan(self._empty((ranks, ranks), torch.int32), self._empty((tokens, ranks), torch.int32))
        args = _cuda.BulkPlanArgs(
            in_rank=in_rank.data_ptr(),
            expert_tokens=0,
            places=plan.places.data_ptr(),
            prefix=plan.prefix.data_ptr(),
            ticket=0,
            tokens=tokens,
            local_experts=0,
            alignment=1,
        )
        self._group.bulk_plan(self._stream(), args)
        return plan

    def _order(self, handle: Handle[ManyState], view: View, options: RecvOptions) -> Received:
        """The view of received rows."""
        if view not in VIEWS:
            raise InvalidArgument("view", str(view), "index or compact")
        self.shapes.check_recv(view, options)
        _refuse({name: options.get(name) for name in ("source_map", "wait_stats")})
        shapes, state, spec = self.shapes, handle.state, self.spec
        most = options.get("most_tokens")
        state.room = spec.num_ranks * min(spec.max_tokens if most is None else most, spec.max_tokens)
        capacity, counts = options.get("capacity"), options.get("counts")
        limit = state.room * min(spec.top_k, shapes.num_local) if capacity is None else capacity
        counts = shapes.counts() if counts is None else counts
        offsets, row_ids = shapes.offsets(), shapes.row_ids(limit)
        state.places = self._empty((state.room, spec.top_k), torch.int32)
        sums = self._empty((_cuda.order_blocks(state.room), shapes.num_local), torch.int32)
        args = _cuda.ManyOrderArgs(
            ids=address(state.arrived.ids),
            prefix=state.plan.prefix.data_ptr(),
            sums=sums.data_ptr(),
            counts=counts.data_ptr(),
            offsets=offsets.data_ptr(),
            row_ids=row_ids.data_ptr(),
            places=state.places.data_ptr(),
            expert_stats=address(options.get("expert_stats")),
            rows=state.room,
            top_k=spec.top_k,
            capacity=limit,
        )
        self._group.many_order(self._stream(), self._launcher.num_sms, args)
        if capacity is None and not torch.cuda.is_current_stream_capturing():
            limit = self._launcher.count_rows(offsets)
            row_ids = row_ids[:limit]
        elif view is View.COMPACT:
            raise InvalidArgument("capacity", capacity, "None with view compact")
        state.capacity = limit
        rows, scales = state.arrived.x, state.arrived.scales
        if view is View.INDEX:
            return Received(rows, counts, offsets, handle, view, scales, row_ids)
        rows, scales = _picked((rows, scales), row_ids)
        return Received(rows, counts, offsets, handle, view, scales)

    def _sum(self, expert_out: torch.Tensor, state: ManyState) -> torch.Tensor:
        """[room, H]: what each received row returns."""
        sums = self._empty((state.room, self.spec.hidden), torch.bfloat16)
        args = _cuda.ManySumArgs(
            expert_out=expert_out.data_ptr(),
            ids=address(state.arrived.ids),
            weights=address(state.arrived.weights),
            places=address(state.places),
            prefix=state.plan.prefix.data_ptr(),
            out=sums.data_ptr(),
            rows=state.room,
            top_k=self.spec.top_k,
            capacity=state.capacity,
        )
        self._group.many_sum(self._stream(), self._launcher.num_sms, args)
        return sums


def _refuse(options: dict[str, object]) -> None:
    """Raises InvalidArgument for what this exchange does not fill."""
    for name, given in options.items():
        if given is not None:
            raise InvalidArgument(name, "given", "None for many rows")


def _picked(tensors: Tensors, row_ids: torch.Tensor) -> Tensors:
    rows, scales = tensors
    picked = rows.view(torch.uint8).index_select(0, row_ids).view(rows.dtype)
    return picked, None if scales is None else scales.index_select(0, row_ids)
