"""Enqueues the kernels of the exchange on the current stream and makes the tensors that they fill.

Knows no state of operations beyond their handles: banks, membership and checks of callers are in cuda.py.
"""

from __future__ import annotations

import torch

from ep_server import _cuda
from ep_server.ep.cuda_handle import DeviceBytes, Handle, raise_status
from ep_server.ep.cuda_shapes import VECTOR, Shapes, Tensors
from ep_server.ep.exchange import ExchangeSpec, Received, Reduction, View
from ep_server.ep.geometry import REDUCTIONS
from ep_server.ep.native import VIEWS
from ep_server.errors import InvalidArgument

SEND, RECV, BOTH = 1, 2, 3  # csrc/cuda/phases.hpp


class Launcher:
    """Kernels of one `_cuda.Group`."""

    def __init__(self, group: _cuda.Group, spec: ExchangeSpec, shapes: Shapes, num_sms: int) -> None:
        self.group, self.spec, self.shapes, self.device = group, spec, shapes, shapes.device
        self.num_sms = num_sms

    def check(self) -> None:
        """Raises what a kernel has found since; never waits."""
        status = self.group.status()
        if status is not None:
            raise_status(status, self.spec)

    def release(self, handle: Handle) -> None:
        """Gives the bank of an in-place view back."""
        self.group.release(self._stream(), handle.memory.data_ptr())

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def send_args(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, count: torch.Tensor | None
    ) -> _cuda.DispatchSendArgs:
        """What dispatch_send reads."""
        return _cuda.DispatchSendArgs(
            x=x.data_ptr(),
            ids=ids.data_ptr(),
            weights=0 if weights is None else weights.data_ptr(),
            tokens_on_device=0
            if count is None
            else self.shapes.check("tokens_on_device", count, torch.int32, 1),
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
        row_bytes = self.spec.hidden * self.shapes.row_dtype.itemsize
        narrow = self.shapes.narrow(row_bytes, tensors)
        if narrow and self.shapes.fp8:
            raise InvalidArgument("x", "not aligned", f"at a multiple of {VECTOR} bytes")
        self.group.dispatch(
            self._stream(), halves, self.num_sms, narrow, send, recv, handle.memory.data_ptr()
        )

    def receive(
        self,
        handle: Handle,
        send: tuple[_cuda.DispatchSendArgs, torch.Tensor] | None,
        view: View,
        out: Tensors | None,
        capacity: int | None,
        source_map: bool,
    ) -> Received:
        """The second half, or both where `send` is given; see PendingDispatch.recv."""
        spec, shapes, device = self.spec, self.shapes, self.device
        counts = torch.empty(shapes.local, dtype=torch.int32, device=device)
        offsets = torch.empty(shapes.local + 1, dtype=torch.int64, device=device)
        rows, row_ids, scales = torch.empty(0, device=device), None, None
        limit = shapes.most_rows if capacity is None else capacity
        if view == View.PADDED:
            rows, scales = shapes.empty_padded() if out is None else shapes.check_out(out)
            if source_map:
                handle.src_info = torch.empty((shapes.local, shapes.padded), dtype=torch.int32, device=device)
                shape = (shapes.local, spec.num_ranks)
                handle.layout_range = torch.empty(shape, dtype=torch.int64, device=device)
        elif out is not None or source_map:
            raise InvalidArgument("out, source_map", str(view), "given with view padded only")
        elif view == View.COMPACT:
            rows = torch.empty((limit, spec.hidden), dtype=shapes.row_dtype, device=device)
            if shapes.fp8:
                scales = torch.empty((limit, shapes.groups), dtype=shapes.scale_dtype, device=device)
        else:
            row_ids = torch.empty(limit, dtype=torch.int64, device=device)
        recv = _cuda.DispatchRecvArgs(
            view=VIEWS[view],
            capacity=limit,
            scale_pitch=shapes.scale_pitch if scales is None or view != View.PADDED else scales.stride(2),
            rows=rows.data_ptr(),
            scales=0 if scales is None else scales.data_ptr(),
            row_ids=0 if row_ids is None else row_ids.data_ptr(),
            counts=counts.data_ptr(),
            offsets=offsets.data_ptr(),
            src_info=0 if handle.src_info is None else handle.src_info.data_ptr(),
            layout_range=0 if handle.layout_range is None else handle.layout_range.data_ptr(),
        )
        args, tensors = (_cuda.DispatchSendArgs(), (rows,)) if send is None else (send[0], (send[1], rows))
        self.dispatch(RECV if send is None else BOTH, args, recv, handle, tensors)
        handle.received, handle.held = True, view == View.INDEX
        if view == View.INDEX:
            rows, scales = self._regions()
        if view != View.PADDED:
            handle.rows = limit
            if capacity is None and not torch.cuda.is_current_stream_capturing():
                handle.rows = int(offsets[-1])  # waits for the GPU
                self.check()
                if view == View.COMPACT:
                    rows, scales = rows[: handle.rows], None if scales is None else scales[: handle.rows]
                row_ids = None if row_ids is None else row_ids[: handle.rows]
        return Received(rows, counts, offsets, handle, view, scales, row_ids)

    def combine(
        self,
        halves: int,
        handle: Handle,
        expert_out: torch.Tensor | None,
        out: torch.Tensor | None,
        weights: torch.Tensor | None,
        reduction: Reduction,
    ) -> None:
        """One kernel."""
        which = REDUCTIONS.index(reduction)
        given = [t for t in (expert_out, out) if t is not None]
        recv = _cuda.CombineRecvArgs(
            out=0 if out is None else out.data_ptr(),
            weights=0 if weights is None else weights.data_ptr(),
            reduction=which,
        )
        self.group.combine(
            self._stream(),
            halves,
            self.num_sms,
            self.shapes.narrow(self.spec.hidden * 2, given),
            _cuda.CombineSendArgs(
                expert_out=0 if expert_out is None else expert_out.data_ptr(), reduction=which
            ),
            recv,
            handle.memory.data_ptr(),
        )

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
