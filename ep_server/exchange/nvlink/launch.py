"""Enqueues the kernels of the exchange over NVLink on the current stream, and raises what they report.

Which operation may run is decided in exchange.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch

from ep_server import _cuda
from ep_server.errors import (
    ConfigError,
    GroupAborted,
    HookNotCalled,
    InternalError,
    InvalidArgument,
    PeerTimeout,
    ProtocolViolation,
)
from ep_server.exchange.api import (
    AddNorm,
    ExchangeStatistics,
    Handle,
    Payload,
    Received,
    RecvOptions,
    Reduction,
    View,
    Wire,
)
from ep_server.exchange.device_wait import IDLE_SECONDS, await_current, longest_wait
from ep_server.exchange.nvlink.banks import (
    BOTH,
    COMBINE,
    DISPATCH,
    RECV,
    DeviceHandle,
    DeviceState,
)
from ep_server.exchange.nvlink.delay import NvlinkDelay
from ep_server.exchange.shapes import VECTOR, VIEWS, Shapes, Tensors
from ep_server.exchange.spec import PAYLOADS, REDUCTIONS, ExchangeSpec, check_spec
from ep_server.exchange.validate import CombineMode, check_tensor

WIRES = tuple(Wire)
MAX_EXPERTS = 2048  # tables of a block's shared memory
MAX_TOKENS = 32768  # counts of a header have 16 bits


@dataclass(slots=True)
class CombineTensors:
    """What a combine reads and fills; None in the half that does not. See FusedExchange.combine."""

    expert_out: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    out: torch.Tensor | None = None
    wait_stats: torch.Tensor | None = None
    next_reads_ahead: bool = False
    add_norm: AddNorm | None = None


class DeviceBytes:
    """Device memory that the exchange owns, as other libraries understand it."""

    def __init__(self, address: int, shape: tuple[int, int]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def bytes_tensor(block: object, device: torch.device) -> torch.Tensor:
    """uint8 of a block with a __cuda_array_interface__; keeps the block alive."""
    return torch.as_tensor(block, device=device)


def check_device_spec(spec: ExchangeSpec, on_timeout: str) -> None:
    """Raises ConfigError for a spec that GPUs of one host do not support."""
    check_spec(spec)
    if spec.num_ranks > _cuda.MAX_RANKS:
        raise ConfigError("num_ranks", spec.num_ranks, f"at most {_cuda.MAX_RANKS} on one host")
    if spec.num_experts > MAX_EXPERTS:
        raise ConfigError("placement", spec.num_experts, f"at most {MAX_EXPERTS} experts on GPUs")
    if spec.max_tokens > MAX_TOKENS:
        raise ConfigError("max_tokens", spec.max_tokens, f"at most {MAX_TOKENS} on GPUs")
    if spec.payload == Payload.FP32:
        raise ConfigError("payload", spec.payload, "bf16 or one of fp8 on a GPU")
    if on_timeout not in {"raise", "mask"}:
        raise ConfigError("on_timeout", on_timeout, "one of raise, mask")


def make_group(spec: ExchangeSpec, device: torch.device, on_timeout: str, heap_bytes: int = 0) -> _cuda.Group:
    """This rank's region and state in the memory of its GPU. Raises RuntimeError where the GPU refuses.

    Args:
        heap_bytes: further memory that peers write, for NvlinkBulk.
    """
    return _cuda.Group(
        num_ranks=spec.num_ranks,
        max_tokens=spec.max_tokens,
        hidden=spec.hidden,
        top_k=spec.top_k,
        num_banks=spec.num_banks,
        payload=PAYLOADS.index(Payload(spec.payload)),
        reduction=REDUCTIONS.index(Reduction(spec.reduction)),
        rank=spec.rank,
        placement=list(spec.placement),
        device=device.index,
        timeout_ns=spec.timeout_ns,
        mask_on_timeout=on_timeout == "mask",
        heap_bytes=heap_bytes,
        idle_seconds=IDLE_SECONDS,
    )


class Launcher:
    """Kernels of one `_cuda.Group`.

    Attributes:
        num_sms: multiprocessors that a kernel may fill. They bound its grid: 1 is enough for any operation.
        generation: owner of current handles. A reset replaces it, since their banks and epochs are gone.
    """

    def __init__(self, group: _cuda.Group, spec: ExchangeSpec, shapes: Shapes, num_sms: int) -> None:
        if not 0 <= num_sms <= group.num_sms:
            raise ConfigError("num_sms", num_sms, f"0 to {group.num_sms}")
        self.group, self.spec, self.shapes, self.device = group, spec, shapes, shapes.device
        self.num_sms, self.generation = num_sms or group.num_sms, object()
        self._delay: NvlinkDelay | None = None

    def new_handle(self, tokens: int, *, weighted: bool) -> DeviceHandle:
        """Of the next dispatch."""
        memory = torch.empty(self.group.handle_bytes, dtype=torch.uint8, device=self.device)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        state = DeviceState(memory, stream, self.spec.max_tokens)
        return Handle(self.generation, tokens, weighted, state)

    def check(self) -> None:
        """Raises what a kernel has found since the last call; never waits."""
        status = self.group.status()
        if status is not None:
            raise_status(status, self.spec)

    def count_rows(self, offsets: torch.Tensor) -> int:
        """Rows that a receive has put in order. Waits for it, without sleep: it takes microseconds as a rule.

        Raises: as check(); InternalError if the receive does not end.
        """
        await_current(self.device, longest_wait(self.spec), "the receive of a dispatch", look=0)
        self.check()
        return int(offsets[-1])

    @contextmanager
    def bounded(self, num_sms: int) -> Iterator[Callable[[], None]]:
        """See FusedExchange."""
        if num_sms < 1:
            raise ConfigError("num_sms", num_sms, "1 or more")
        before, self.num_sms = self.num_sms, min(num_sms, self.num_sms)
        deferred = nullcontext(lambda: None) if self._delay is None else self._delay.defer()
        try:
            with deferred as await_delay:
                yield await_delay
        finally:
            self.num_sms = before

    def inject_delay(self, seconds: float, barrier: Callable[[], None]) -> NvlinkDelay:
        """See NvlinkExchange."""
        delay = self._delay or NvlinkDelay(self.group, barrier, self.spec, self.device)
        delay.set(seconds)
        self._delay = delay
        return delay

    def last_epoch(self) -> int:
        """No operation so far has a later one."""
        dispatches, combines, _ = self.group.epochs()
        return max(dispatches, combines, self.group.bulk_operations())

    def release(self, handle: DeviceHandle) -> None:
        """Gives the bank of an in-place view back."""
        self._check_own(handle)
        self.group.release(self._stream(handle), handle.state.memory.data_ptr())

    def publish(self) -> None:
        """Publishes which banks were read, where no further kernel may follow for a while."""
        self.group.publish(self._stream())

    def statistics(self) -> ExchangeStatistics:
        """As Exchange.statistics."""
        found: dict[str, Any] = self.group.statistics()
        local = found.pop("local_expert_tokens")
        found["expert_tokens"] = {e: local[i] for i, e in enumerate(self.spec.local_experts)}
        return cast("ExchangeStatistics", found)

    def _stream(self, handle: DeviceHandle | None = None) -> int:
        """The current one. Records it with the allocator for a handle of another stream."""
        stream = torch.cuda.current_stream(self.device)
        if handle is not None and handle.state.stream != stream.cuda_stream:
            handle.state.memory.record_stream(stream)
        return int(stream.cuda_stream)

    def dispatch(
        self,
        halves: int,
        send: _cuda.DispatchSendArgs,
        recv: _cuda.DispatchRecvArgs,
        handle: DeviceHandle,
        tensors: tuple[torch.Tensor, ...],
        *,
        next_reads_ahead: bool = False,
    ) -> None:
        """One kernel. tensors: rows that it reads or writes."""
        self._check_own(handle)
        narrow = _narrow(self.spec.hidden * self.shapes.row_dtype.itemsize, tensors)
        if narrow and self.shapes.fp8:
            raise InvalidArgument("x", "not aligned", f"at a multiple of {VECTOR} bytes")
        stream, memory = self._stream(handle), handle.state.memory.data_ptr()
        self.group.dispatch(stream, halves, self.num_sms, handle.state.most, narrow, send, recv, memory)
        if self._delay is not None:
            self._delay.follow(DISPATCH, halves, handle, next_reads_ahead=next_reads_ahead)

    def receive(
        self,
        handle: DeviceHandle,
        send: tuple[_cuda.DispatchSendArgs, torch.Tensor] | None,
        view: View,
        options: RecvOptions,
    ) -> Received:
        """The second half, or both where `send` is given."""
        shapes, state = self.shapes, handle.state
        if options:
            shapes.check_recv(view, options)
        capacity, counts = options.get("capacity"), options.get("counts")
        limit = shapes.most_rows if capacity is None else capacity
        counts, offsets, row_ids = shapes.counts() if counts is None else counts, shapes.offsets(), None
        if view is View.PADDED:
            rows, scales = options.get("out") or shapes.padded()
        else:
            rows, scales = shapes.compact(limit if view is View.COMPACT else 0)
        if view is View.INDEX:
            scales, row_ids = None, shapes.row_ids(limit)
        if (most := options.get("most_tokens")) is not None:
            state.most = min(most, self.spec.max_tokens)
        info, ranges = options.get("source_map") or (None, None)
        ahead = options.get("next_reads_ahead", False)
        recv = _cuda.DispatchRecvArgs(
            view=VIEWS[view],
            capacity=limit,
            scale_pitch=scales.stride(2) if scales is not None and scales.dim() == 3 else shapes.scale_pitch,
            rows=rows.data_ptr(),
            scales=address(scales),
            row_ids=address(row_ids),
            counts=counts.data_ptr(),
            offsets=offsets.data_ptr(),
            src_info=address(info),
            layout_range=address(ranges),
            expert_stats=address(options.get("expert_stats")),
            wait_stats=address(options.get("wait_stats")),
            next_reads_ahead=ahead,
        )
        if send is None:
            self.dispatch(RECV, _cuda.DispatchSendArgs(), recv, handle, (rows,), next_reads_ahead=ahead)
        else:
            self.dispatch(BOTH, send[0], recv, handle, (send[1], rows), next_reads_ahead=ahead)
        state.received, state.held = True, view is View.INDEX
        if view is View.PADDED:
            return Received(rows, counts, offsets, handle, view, scales)
        cut = capacity is None and not torch.cuda.is_current_stream_capturing()
        if cut:
            limit = self.count_rows(offsets)
        state.rows = limit
        if view is View.INDEX:
            assert row_ids is not None
            rows, scales = self._regions()
            return Received(rows, counts, offsets, handle, view, scales, row_ids[:limit] if cut else row_ids)
        if cut:
            rows, scales = rows[:limit], None if scales is None else scales[:limit]
        return Received(rows, counts, offsets, handle, view, scales)

    def combine(self, halves: int, handle: DeviceHandle, mode: CombineMode, tensors: CombineTensors) -> None:
        """One kernel."""
        self._check_own(handle)
        which, wire = REDUCTIONS.index(mode.reduction), WIRES.index(mode.wire)
        pushed = mode.reduction is Reduction.RANK and not handle.weighted
        narrow = _narrow(self.spec.hidden * 2, (tensors.expert_out, tensors.out))
        if narrow and (mode.wire is not Wire.BF16 or tensors.add_norm is not None):
            raise InvalidArgument("expert_out, out", "not aligned", f"at multiples of {VECTOR} bytes")
        send = _cuda.CombineSendArgs(
            expert_out=address(tensors.expert_out),
            weights=address(tensors.weights) if pushed else 0,
            reduction=which,
            wire=wire,
            pushes_weights=pushed,
            frees_dispatch=handle.state.held,
        )
        recv = _cuda.CombineRecvArgs(
            out=address(tensors.out),
            weights=0 if pushed else address(tensors.weights),
            reduction=which,
            wire=wire,
            wait_stats=address(tensors.wait_stats),
            next_reads_ahead=tensors.next_reads_ahead,
            norm=_norm_args(tensors.add_norm),
        )
        stream, state = self._stream(handle), handle.state
        memory = state.memory.data_ptr()
        self.group.combine(stream, halves, self.num_sms, state.most, narrow, send, recv, memory)
        if self._delay is not None:
            self._delay.follow(COMBINE, halves, handle, next_reads_ahead=tensors.next_reads_ahead)

    def can_norm(self, norm: AddNorm) -> bool:
        """Whether the kernel of combine takes these tensors; otherwise another kernel norms its sums."""
        tensors = [t for t in (norm.residual, norm.weight, norm.shared) if t is not None]
        plain = all(t.dtype == torch.bfloat16 and t.is_contiguous() for t in tensors)
        return plain and not _narrow(self.spec.hidden * 2, tensors)

    def check_norm(self, tokens: int, norm: AddNorm, wire: Wire) -> None:
        """Raises InvalidArgument for what a combine of T = `tokens` cannot norm."""
        hidden = self.spec.hidden
        sizes = {"T": tokens, "H": hidden}
        check_tensor("add_norm.residual", norm.residual, self.device, torch.bfloat16, **sizes)
        check_tensor("add_norm.weight", norm.weight, self.device, torch.bfloat16, H=hidden)
        if norm.shared is not None:
            check_tensor("add_norm.shared", norm.shared, self.device, torch.bfloat16, **sizes)
        if wire is not Wire.BF16:
            raise InvalidArgument("wire", str(wire), "bf16 with add_norm")
        if not self.can_norm(norm):
            raise InvalidArgument("add_norm", f"H = {hidden}", "rows at multiples of 16 bytes")

    def _check_own(self, handle: DeviceHandle) -> None:
        if handle.owner is not self.generation:
            given = "of another exchange, or of before a reset"
            raise InvalidArgument("received.handle", given, "of a dispatch of this exchange")

    def _regions(self) -> Tensors:
        """The rows of all receive banks in place: [banks * R * max_tokens, H], and their scales."""
        shapes, group = self.shapes, self.group
        shape = (self.spec.num_banks * shapes.padded_rows, group.row_pitch)
        block = bytes_tensor(DeviceBytes(group.rows_at(0), shape), self.device)
        width = self.spec.hidden * shapes.row_dtype.itemsize
        rows = block[:, :width].view(shapes.row_dtype)
        if not shapes.fp8:
            return rows, None
        begin = group.scale_offset
        return rows, block[:, begin : begin + shapes.groups * 4].view(shapes.scale_dtype)


def address(tensor: torch.Tensor | None) -> int:
    """Of its first element; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def _narrow(row_bytes: int, tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether 16-byte accesses are not possible."""
    return row_bytes % VECTOR != 0 or any(address(tensor) % VECTOR for tensor in tensors)


def _norm_args(norm: AddNorm | None) -> _cuda.AddNorm:
    if norm is None:
        return _cuda.AddNorm()
    return _cuda.AddNorm(
        residual=norm.residual.data_ptr(),
        shared=address(norm.shared),
        weight=norm.weight.data_ptr(),
        eps=norm.eps,
    )


def raise_status(status: tuple[int, str, str, int, int, int, int], spec: ExchangeSpec) -> None:
    """Raises what (code, op, phase, rank, peer, expected, seen) of csrc/exchange/common/status.hpp means."""
    code, op, phase, rank, peer, expected, seen = status
    where = f"{op}/{phase}, rank {rank}, peer {peer}, expected epoch {expected}, saw {seen}"
    if code == _cuda.BAD_IDS:
        allowed = f"-1 to {spec.num_experts - 1}, distinct within its token"
        raise InvalidArgument(f"topk_ids[{expected}, {seen}]", "refused by the kernel", allowed)
    if code == _cuda.CAPACITY:
        raise InvalidArgument("capacity", expected, f"enough for the received rows: row {seen} did not fit")
    if code == 1:
        raise PeerTimeout(op, phase, rank, peer, expected, seen)
    if code == 2:
        raise HookNotCalled(
            f"rank {rank}: {op} takes the bank of epoch {expected}, which was not received here"
        )
    if code == 3:
        raise ProtocolViolation(f"a cell is newer than expected or invalid: {where}")
    if code == 4 and (expected, seen) == (0, _cuda.REQUESTED):
        raise GroupAborted(f"rank {rank} ended the waits of its GPU: its group is aborted or reset")
    if code == 4:
        raise GroupAborted(f"the group was aborted after an error in {where}")
    raise InternalError(f"unexpected status {code}: {where}")
