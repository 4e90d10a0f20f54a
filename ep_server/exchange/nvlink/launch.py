"""Enqueues the kernels of the exchange on the current stream.

Knows no state of operations beyond their handles: banks, membership and checks of callers are elsewhere.
"""

from __future__ import annotations

import torch

from ep_server import _cuda
from ep_server.errors import InvalidArgument
from ep_server.exchange.api import AddNorm, ExchangeSpec, Payload, Received, Reduction, View
from ep_server.exchange.geometry import PAYLOADS, REDUCTIONS
from ep_server.exchange.nvlink.requests import (
    CombineMode,
    CombineTensors,
    DeviceBytes,
    Handle,
    Receipt,
    Wire,
    raise_status,
)
from ep_server.exchange.nvlink.shapes import VECTOR, RecvTensors, Shapes
from ep_server.exchange.shm import VIEWS
from ep_server.exchange.views import Tensors

SEND, RECV, BOTH = 1, 2, 3  # csrc/exchange/nvlink/phases.hpp
WIRES = tuple(Wire)


def make_group(spec: ExchangeSpec, device: torch.device, on_timeout: str) -> _cuda.Group:
    """This rank's region and state in the memory of its GPU. Raises RuntimeError for what the GPU refuses."""
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
    )


def address(tensor: torch.Tensor | None) -> int:
    """Of its first element; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def _norm_args(norm: AddNorm | None) -> _cuda.AddNorm:
    if norm is None:
        return _cuda.AddNorm()
    return _cuda.AddNorm(
        residual=norm.residual.data_ptr(),
        shared=address(norm.shared),
        weight=norm.weight.data_ptr(),
        eps=norm.eps,
    )


class Launcher:
    """Kernels of one `_cuda.Group`.

    Attributes:
        generation: what handles of now have, and none of another group or of before a reset.
    """

    def __init__(self, group: _cuda.Group, spec: ExchangeSpec, shapes: Shapes, num_sms: int) -> None:
        self.group, self.spec, self.shapes, self.device = group, spec, shapes, shapes.device
        self.num_sms, self.generation = num_sms, object()

    def new_generation(self) -> None:
        """From now on handles of before are refused: their banks and epochs are no more."""
        self.generation = object()

    def check(self) -> None:
        """Raises what a kernel has found since; never waits."""
        status = self.group.status()
        if status is not None:
            raise_status(status, self.spec)

    def release(self, handle: Handle) -> None:
        """Gives the bank of an in-place view back."""
        self._check_own(handle)
        self.group.release(self._stream(handle), handle.memory.data_ptr())

    def publish(self) -> None:
        """Tells the senders which banks were read, where no further kernel may follow for a while."""
        self.group.publish(self._stream())

    def _stream(self, handle: Handle | None = None) -> int:
        """The current one; the allocator learns that a handle of another stream is used here."""
        stream = torch.cuda.current_stream(self.device)
        if handle is not None and handle.stream != stream.cuda_stream:
            handle.memory.record_stream(stream)
        return int(stream.cuda_stream)

    def send_args(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, count: torch.Tensor | None
    ) -> _cuda.DispatchSendArgs:
        """What dispatch_send reads."""
        return _cuda.DispatchSendArgs(
            x=x.data_ptr(),
            ids=ids.data_ptr(),
            weights=address(weights),
            tokens_on_device=self.shapes.optional("tokens_on_device", count, torch.int32, 1),
            tokens=x.shape[0],
        )

    def dispatch(
        self,
        halves: int,
        send: _cuda.DispatchSendArgs,
        recv: _cuda.DispatchRecvArgs,
        handle: Handle,
        tensors: tuple[torch.Tensor, ...],
    ) -> None:
        """One kernel."""
        self._check_own(handle)
        row_bytes = self.spec.hidden * self.shapes.row_dtype.itemsize
        narrow = self.shapes.narrow(row_bytes, tensors)
        if narrow and self.shapes.fp8:
            raise InvalidArgument("x", "not aligned", f"at a multiple of {VECTOR} bytes")
        self.group.dispatch(
            self._stream(handle),
            halves,
            self.num_sms,
            handle.most,
            narrow,
            send,
            recv,
            handle.memory.data_ptr(),
        )

    def receive(
        self, handle: Handle, send: tuple[_cuda.DispatchSendArgs, torch.Tensor] | None, receipt: Receipt
    ) -> Received:
        """The second half, or both where `send` is given; see PendingDispatch.recv."""
        filled = self.shapes.recv_tensors(receipt)
        if receipt.source_map:
            handle.src_info, handle.layout_range = self.shapes.source_map()
        if receipt.most_tokens is not None:
            if receipt.most_tokens < 0:
                raise InvalidArgument("most_tokens", receipt.most_tokens, "at least 0")
            handle.most = min(receipt.most_tokens, self.spec.max_tokens)
        recv = self._recv_args(handle, receipt, filled)
        if send is None:
            self.dispatch(RECV, _cuda.DispatchSendArgs(), recv, handle, (filled.rows,))
        else:
            self.dispatch(BOTH, send[0], recv, handle, (send[1], filled.rows))
        handle.received, handle.held = True, receipt.view == View.INDEX
        if receipt.view != View.PADDED:
            handle.rows = filled.limit
            if receipt.capacity is None and not torch.cuda.is_current_stream_capturing():
                self._cut(handle, filled)
        if receipt.view == View.INDEX:
            filled.rows, filled.scales = self._regions()
        return Received(
            filled.rows,
            filled.counts,
            filled.offsets,
            handle,
            receipt.view,
            filled.scales,
            filled.row_ids,
        )

    def _recv_args(self, handle: Handle, receipt: Receipt, filled: RecvTensors) -> _cuda.DispatchRecvArgs:
        shapes, scales, optional = self.shapes, filled.scales, self.shapes.optional
        padded = receipt.view == View.PADDED
        return _cuda.DispatchRecvArgs(
            view=VIEWS[receipt.view],
            capacity=filled.limit,
            scale_pitch=scales.stride(2) if scales is not None and padded else shapes.scale_pitch,
            rows=filled.rows.data_ptr(),
            scales=address(scales),
            row_ids=address(filled.row_ids),
            counts=filled.counts.data_ptr(),
            offsets=filled.offsets.data_ptr(),
            src_info=address(handle.src_info),
            layout_range=address(handle.layout_range),
            expert_stats=optional("expert_stats", receipt.expert_stats, torch.int32, shapes.local),
            wait_stats=optional("wait_stats", receipt.wait_stats, torch.int64, self.spec.num_ranks),
            next_reads_ahead=receipt.next_reads_ahead,
        )

    def _cut(self, handle: Handle, filled: RecvTensors) -> None:
        """To the rows that came. Waits for the GPU."""
        handle.rows = rows = int(filled.offsets[-1])
        self.check()
        if filled.row_ids is not None:
            filled.row_ids = filled.row_ids[:rows]
            return
        filled.rows = filled.rows[:rows]
        filled.scales = None if filled.scales is None else filled.scales[:rows]

    def combine(self, halves: int, handle: Handle, mode: CombineMode, tensors: CombineTensors) -> None:
        """One kernel; see PendingCombine."""
        self._check_own(handle)
        which, wire = REDUCTIONS.index(mode.reduction), WIRES.index(mode.wire)
        given = [t for t in (tensors.expert_out, tensors.out) if t is not None]
        pushed = mode.reduction == Reduction.RANK and not handle.weighted
        narrow = self.shapes.narrow(self.spec.hidden * 2, given)
        if narrow and (mode.wire != Wire.BF16 or tensors.add_norm is not None):
            raise InvalidArgument("expert_out, out", "not aligned", f"at multiples of {VECTOR} bytes")
        self.group.combine(
            self._stream(handle),
            halves,
            self.num_sms,
            handle.most,
            narrow,
            _cuda.CombineSendArgs(
                expert_out=address(tensors.expert_out),
                weights=address(tensors.weights) if pushed else 0,
                reduction=which,
                wire=wire,
                pushes_weights=pushed,
                frees_dispatch=handle.held,
            ),
            _cuda.CombineRecvArgs(
                out=address(tensors.out),
                weights=0 if pushed else address(tensors.weights),
                reduction=which,
                wire=wire,
                wait_stats=self.shapes.optional(
                    "wait_stats", tensors.wait_stats, torch.int64, self.spec.num_ranks
                ),
                next_reads_ahead=tensors.next_reads_ahead,
                norm=_norm_args(tensors.add_norm),
            ),
            handle.memory.data_ptr(),
        )

    def _check_own(self, handle: Handle) -> None:
        if handle.generation is not self.generation:
            given = "of another exchange, or of before a reset"
            raise InvalidArgument("received.handle", given, "of a dispatch of this exchange")

    def _regions(self) -> Tensors:
        """The rows of all receive banks in place: [banks * R * max_tokens, H], and their scales."""
        spec, group = self.spec, self.group
        block = torch.as_tensor(
            DeviceBytes(group.rows_at(0), (spec.num_banks * self.shapes.padded, group.row_pitch)),
            device=self.device,
        )
        width = spec.hidden * self.shapes.row_dtype.itemsize
        rows = block[:, :width].view(self.shapes.row_dtype)
        if not self.shapes.fp8:
            return rows, None
        begin, bytes_of_scales = group.scale_offset, self.shapes.groups * 4
        return rows, block[:, begin : begin + bytes_of_scales].view(self.shapes.scale_dtype)
