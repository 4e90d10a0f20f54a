"""The exchange of many rows over NVLink, on CUDA tensors: one GPU per rank, one host.

Ranks receive straight into blocks of a heap that all of them can write. Received tensors are such blocks, as
long as another one of the same size still fits in the heap; otherwise they are copied out. Kernels run on the
current stream. Only a plan with a report waits for the GPU. The next call raises what a kernel has found.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

import torch

from ep_server import _C, _cuda
from ep_server.errors import InternalError, InvalidArgument
from ep_server.exchange.bootstrap import share_regions
from ep_server.exchange.bulk import Arrival, Plan, Returned, Routing, Rows
from ep_server.exchange.device_wait import await_idle, longest_wait
from ep_server.exchange.host import HostGroup
from ep_server.exchange.nvlink import launch
from ep_server.exchange.nvlink.ends import begins, end
from ep_server.exchange.nvlink.heap import Heap
from ep_server.exchange.spec import ExchangeSpec, Payload

SLICE_NS = 1_000_000  # the host looks for failures that often while it waits for a plan
BF16_BYTES = 2


def bulk_spec(rank: int, num_ranks: int, timeout_ns: int) -> ExchangeSpec:
    """Of the group whose heaps a NvlinkBulk uses. Its slots are as small as they can be."""
    return ExchangeSpec(
        rank=rank,
        num_ranks=num_ranks,
        placement=tuple(range(num_ranks)),
        max_tokens=1,
        hidden=128,
        top_k=1,
        payload=Payload.BF16,
        num_banks=2,
        timeout_ns=timeout_ns,
    )


class NvlinkBulk:
    """A BulkExchange between GPUs.

    Args:
        spec: bulk_spec() of this rank.
        control: the group of control_spec(spec) over the same ranks; owned from now on.
        heap_bytes: GPU memory for received rows, the same on all ranks.
    Raises: ConfigError; StartupError where a GPU, its driver or peer access is missing.
    """

    def __init__(
        self,
        spec: ExchangeSpec,
        *,
        control: HostGroup,
        device: torch.device,
        heap_bytes: int,
    ) -> None:
        self.spec, self.device, self._control = spec, device, control
        with begins(spec, control), torch.cuda.device(device):
            launch.check_device_spec(spec, "raise")
            group = launch.make_group(spec, device, "raise", heap_bytes)
            share_regions(control, spec, group)
        self._group: _cuda.Group | None = group
        self._memory = _Memory(group, device, heap_bytes)
        self._tickets = 0

    @property
    def group(self) -> _cuda.Group:
        """The end of csrc. Raises InvalidArgument once closed."""
        if self._group is None:
            raise InvalidArgument("exchange", "closed", "open")
        return self._group

    def plan(self, routing: Routing, *, report: bool) -> tuple[Plan, tuple[int, list[int]] | None]:
        """See BulkExchange."""
        self.check()
        ranks, tokens = self.spec.num_ranks, routing.in_rank.shape[0]
        local = routing.expert_tokens.shape[0] // ranks
        if tokens > _C.BULK_MAX_ROWS:
            raise InvalidArgument("x", f"{tokens} tokens", f"at most {_C.BULK_MAX_ROWS}")
        if local > _C.BULK_MAX_LOCAL_EXPERTS:
            allowed = f"at most {_C.BULK_MAX_LOCAL_EXPERTS} per rank"
            raise InvalidArgument("num_tokens_per_expert", f"{local} experts per rank", allowed)
        places = torch.empty((tokens, ranks), dtype=torch.int32, device=self.device)
        plan = Plan(torch.empty((ranks, ranks), dtype=torch.int32, device=self.device), places)
        self._tickets += report
        args = _cuda.BulkPlanArgs(
            in_rank=routing.in_rank.data_ptr(),
            expert_tokens=routing.expert_tokens.data_ptr(),
            places=places.data_ptr(),
            prefix=plan.prefix.data_ptr(),
            ticket=self._tickets if report else 0,
            tokens=tokens,
            local_experts=local,
            alignment=routing.alignment,
        )
        self.group.bulk_plan(self._stream(), args)
        return plan, self._report(local) if report else None

    def dispatch(
        self, rows: Rows, plan: Plan, arrival: Arrival, num_sms: int
    ) -> tuple[Rows, torch.Tensor | None]:
        """See BulkExchange."""
        self.check()
        block = _Block.of(rows, arrival)
        tokens, hidden = rows.x.shape
        top_k = 0 if rows.ids is None else rows.ids.shape[1]
        self._memory.reserve(self._combine_bytes(tokens, hidden * BF16_BYTES, top_k))
        landing = self._memory.land(block.total, graph_safe=arrival.worst)
        args = dispatch_args(rows, plan, arrival, landing.offset)
        self.group.bulk_dispatch(self._stream(), self._sms(num_sms), args)
        return block.tensors(landing.bytes(block.total), rows, arrival)

    def combine(
        self, returned: Returned, plan: Plan, num_sms: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See BulkExchange."""
        self.check()
        tokens, hidden = plan.places.shape[0], returned.x.shape[1]
        top_k = 0 if returned.weights is None else returned.weights.shape[1]
        out = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=self.device)
        sums = torch.empty((tokens, top_k), dtype=torch.float32, device=self.device)
        offset = self._memory.scratch(self._combine_bytes(tokens, hidden * BF16_BYTES, top_k))
        args = combine_args(returned, plan, (out, sums), offset)
        self.group.bulk_combine(self._stream(), self._sms(num_sms), args)
        return out, None if returned.weights is None else sums

    def check(self) -> None:
        """Raises what a kernel has found since the last call; never waits."""
        status = self.group.status()
        if status is not None:
            launch.raise_status(status, self.spec)

    def reset(self) -> None:
        """See BulkExchange. Waits for the GPU."""
        await_idle(self.device)
        self._control.reset()
        theirs = self._control.all_gather(self.group.bulk_operations().to_bytes(8, "little"))
        last = max(int.from_bytes(record, "little") for record in theirs)
        banks = self.spec.num_banks
        self.group.reset((last + 2 * banks) // banks * banks, 0)  # beyond every operation so far
        self._control.barrier()

    def close(self) -> None:
        """See BulkExchange. Waits for the GPU, as ends.end(). Received tensors stay valid."""
        group, self._group = self._group, None
        if group is not None:
            end(self.spec, self._control, self.device, group)

    def _report(self, local_experts: int) -> tuple[int, list[int]]:
        seconds = longest_wait(self.spec)
        deadline = time.monotonic() + seconds
        while (found := self.group.bulk_report(self._tickets, local_experts, SLICE_NS)) is None:
            self.check()
            if time.monotonic() > deadline:
                raise InternalError(f"the device has not ended the plan of a dispatch in {seconds:g} s")
        return found

    def _combine_bytes(self, tokens: int, row_bytes: int, top_k: int) -> int:
        """Of the memory where rows return, from each other rank apart."""
        rows = (self.spec.num_ranks - 1) * tokens
        return _C.bulk_block(rows=rows, row_bytes=row_bytes, top_k=top_k)[-1]

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def _sms(self, wanted: int) -> int:
        return max(1, min(wanted, self.group.num_sms))


def dispatch_args(rows: Rows, plan: Plan, arrival: Arrival, offset: int) -> _cuda.BulkDispatchArgs:
    """Of a dispatch that receives at `offset` of the heap."""
    scales, ids = rows.scales, rows.ids
    return _cuda.BulkDispatchArgs(
        x=rows.x.data_ptr(),
        scales=launch.address(scales),
        ids=launch.address(ids),
        weights=launch.address(rows.weights),
        places=plan.places.data_ptr(),
        prefix=plan.prefix.data_ptr(),
        offset=offset,
        capacity=arrival.rows,
        tokens=rows.x.shape[0],
        row_bytes=rows.x.shape[1] * rows.x.itemsize,
        scale_words=0 if scales is None else scales.shape[1],
        top_k=0 if ids is None else ids.shape[1],
        local_experts=arrival.local_experts,
        scale_row=0 if scales is None else scales.stride(0),
        scale_column=0 if scales is None else scales.stride(1),
        sources=arrival.with_sources,
        fill=arrival.worst and ids is not None,
    )


def combine_args(
    returned: Returned, plan: Plan, into: tuple[torch.Tensor, torch.Tensor], offset: int
) -> _cuda.BulkCombineArgs:
    """Of a combine into sums [T, H] and sums of weights [T, K]; rows return to `offset` of the heap."""
    (tokens, ranks), weights, (out, sums) = plan.places.shape, returned.weights, into
    bias = [*(each.data_ptr() for each in returned.bias), 0, 0]
    return _cuda.BulkCombineArgs(
        x=returned.x.data_ptr(),
        weights=launch.address(weights),
        first_bias=bias[0],
        second_bias=bias[1],
        places=plan.places.data_ptr(),
        prefix=plan.prefix.data_ptr(),
        out=out.data_ptr(),
        out_weights=0 if weights is None else sums.data_ptr(),
        offset=offset,
        capacity=(ranks - 1) * tokens,
        tokens=tokens,
        row_bytes=returned.x.shape[1] * returned.x.itemsize,
        top_k=0 if weights is None else weights.shape[1],
    )


class _Block:
    """The arrays of one received block. Offsets come from csrc/exchange/common/layout.hpp."""

    def __init__(self, offsets: tuple[int, int, int, int, int]) -> None:
        self._scales, self._ids, self._weights, self._sources, self.total = offsets

    @classmethod
    def of(cls, rows: Rows, arrival: Arrival) -> _Block:
        """For rows like these."""
        return cls(
            _C.bulk_block(
                rows=arrival.rows,
                row_bytes=rows.x.shape[1] * rows.x.itemsize,
                scale_words=0 if rows.scales is None else rows.scales.shape[1],
                top_k=0 if rows.ids is None else rows.ids.shape[1],
                with_ids=True,
                with_sources=arrival.with_sources,
            )
        )

    def tensors(self, memory: torch.Tensor, sent: Rows, arrival: Arrival) -> tuple[Rows, torch.Tensor | None]:
        """Views of a block's bytes."""

        def part(begin: int, like: torch.Tensor) -> torch.Tensor:
            size = arrival.rows * like.shape[1] * like.itemsize
            return memory[begin : begin + size].view(like.dtype).view(arrival.rows, like.shape[1])

        found = Rows(
            x=part(0, sent.x),
            scales=None if sent.scales is None else part(self._scales, sent.scales),
            ids=None if sent.ids is None else part(self._ids, sent.ids),
            weights=None if sent.weights is None else part(self._weights, sent.weights),
        )
        if not arrival.with_sources:
            return found, None
        return found, memory[self._sources : self._sources + arrival.rows * 4].view(torch.int32)


class _Lease:
    """A block of the heap. It is free again when the last tensor on it is gone."""

    def __init__(self, memory: _Memory, offset: int, size: int) -> None:
        self._memory, self._offset = memory, offset
        block = launch.DeviceBytes(memory.address + offset, (1, max(size, 1)))
        self.__cuda_array_interface__ = block.__cuda_array_interface__

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._memory.give(self._offset)


class _Landing:
    """Where a dispatch receives: a block that the caller keeps, or scratch memory that is copied."""

    def __init__(self, memory: _Memory, offset: int, lease: _Lease | None) -> None:
        self._memory, self.offset, self._lease = memory, offset, lease

    def bytes(self, size: int) -> torch.Tensor:
        """uint8 [size] for the caller, once the kernel is enqueued."""
        if self._lease is not None:
            return launch.bytes_tensor(self._lease, self._memory.device)[0]
        block = launch.DeviceBytes(self._memory.address + self.offset, (1, max(size, 1)))
        return launch.bytes_tensor(block, self._memory.device)[0].clone()


class _Memory:
    """The heap of one rank.

    Captured graphs use scratch memory only, which is never given back: a replay must find it unused. One
    scratch block is enough, because every operation is done with it before the next one starts.
    """

    def __init__(self, group: _cuda.Group, device: torch.device, size: int) -> None:
        self._group, self.device, self.address = group, device, group.heap()
        self._heap: Heap[torch.cuda.Event] = Heap(size, _C.BULK_UNIT, torch.cuda.Event.query)
        self._size = size
        self._scratch, self._scratch_size, self._in_graphs = 0, 0, False
        self._unmarked: list[int] = []

    def land(self, size: int, *, graph_safe: bool) -> _Landing:
        """Memory for one dispatch. graph_safe: calls in a graph will need as much.

        Raises: InvalidArgument where the heap is too small.
        """
        if capturing():
            return _Landing(self, self.scratch(size), None)
        if graph_safe:
            self.scratch(size)
        self._mark()
        taken = self._heap.take(size)
        if taken is None or (not self._heap.fits(size) and self._scratch_size < size):
            if taken is not None:
                self._heap.give(taken[0], *taken[1])
            return _Landing(self, self.scratch(size), None)
        self._wait(taken[1])
        return _Landing(self, taken[0], _Lease(self, taken[0], size))

    def scratch(self, size: int) -> int:
        """The offset of memory that is used until the operation's kernel and what copies from it have run.

        Raises: InvalidArgument where the heap is too small, or if a graph needs more than calls before it.
        """
        if capturing():
            self._in_graphs = True
            if size > self._scratch_size:
                allowed = "of sizes used in a call outside of a graph first"
                raise InvalidArgument("num_worst_tokens", f"a block of {size} bytes", allowed)
        elif size > self._scratch_size and not self.reserve(size):
            allowed = f"larger: {size} bytes are needed at once, and received tensors hold the rest"
            raise InvalidArgument("num_nvl_bytes", self._size, allowed)
        return self._scratch

    def reserve(self, size: int) -> bool:
        """Makes the scratch memory at least so large, outside of a graph. Returns whether it is."""
        if size <= self._scratch_size or capturing():
            return size <= self._scratch_size
        self._mark()
        taken = self._heap.take(size)
        if taken is None:
            return False
        self._wait(taken[1])
        if self._scratch_size and not self._in_graphs:
            self.give(self._scratch)
        self._scratch, self._scratch_size = taken[0], size
        return True

    def give(self, offset: int) -> None:
        """Frees a block once what is enqueued on the current stream has run."""
        if capturing():
            self._unmarked.append(offset)
        else:
            self._heap.give(offset, self._event())

    def _mark(self) -> None:
        while self._unmarked:
            self._heap.give(self._unmarked.pop(), self._event())

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _wait(self, events: Iterable[torch.cuda.Event]) -> None:
        stream = torch.cuda.current_stream(self.device)
        for event in events:
            stream.wait_event(event)


def capturing() -> bool:
    """Whether calls on the current stream are captured into a graph."""
    return torch.cuda.is_current_stream_capturing()
