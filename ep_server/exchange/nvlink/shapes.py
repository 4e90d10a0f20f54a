"""Shapes of the exchange on GPUs: what a call may be given, and the tensors it fills.

Knows the spec and the device; nothing of kernels, streams or peers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ep_server.errors import InvalidArgument
from ep_server.exchange.api import ExchangeSpec, Payload, View
from ep_server.exchange.geometry import FP8
from ep_server.exchange.nvlink.handle import Handle
from ep_server.exchange.nvlink.requests import Receipt
from ep_server.exchange.views import Tensors

VECTOR = 16  # bytes of one access


@dataclass(slots=True)
class RecvTensors:
    """Where a receive writes. rows is empty and row_ids given for INDEX; limit: rows of a compact view."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    row_ids: torch.Tensor | None
    counts: torch.Tensor
    offsets: torch.Tensor
    limit: int


class Shapes:
    """Sizes of one rank's tensors on its GPU."""

    def __init__(self, spec: ExchangeSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self.fp8 = spec.payload in FP8
        self.ue8m0 = spec.payload == Payload.FP8_UE8M0
        self.row_dtype = torch.float8_e4m3fn if self.fp8 else torch.bfloat16
        self.local = len(spec.local_experts)
        self.padded = spec.num_ranks * spec.max_tokens

    def empty_padded(self) -> Tensors:
        """Rows and scales of a PADDED view; each scale column starts at a multiple of 16 bytes."""
        shape = (self.local, self.padded, self.spec.hidden)
        rows = torch.empty(shape, dtype=self.row_dtype, device=self.device)
        if not self.fp8:
            return rows, None
        plane = (self.local, self.groups, self.scale_pitch)
        scales = torch.empty(plane, dtype=self.scale_dtype, device=self.device)
        return rows, scales.transpose(1, 2)[:, : self.padded]

    def empty_compact(self, rows: int) -> Tensors:
        """Rows and scales of a COMPACT view."""
        values = torch.empty((rows, self.spec.hidden), dtype=self.row_dtype, device=self.device)
        if not self.fp8:
            return values, None
        return values, torch.empty((rows, self.groups), dtype=self.scale_dtype, device=self.device)

    @property
    def groups(self) -> int:
        """Scale words of a row."""
        return self.spec.hidden // (512 if self.ue8m0 else 128)

    @property
    def scale_dtype(self) -> torch.dtype:
        """int32 where four exponents share a word."""
        return torch.int32 if self.ue8m0 else torch.float32

    @property
    def scale_pitch(self) -> int:
        """Tokens from one scale column to the next: a multiple of 16 bytes."""
        return -(-self.padded // 4) * 4

    @property
    def most_rows(self) -> int:
        """Of a compact view."""
        return self.padded * min(self.spec.top_k, self.local)

    def check(self, name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> int:
        """The address of a contiguous tensor of this dtype and shape here, or InvalidArgument."""
        good = tensor.dtype == dtype and tuple(tensor.shape) == shape and tensor.is_contiguous()
        if not good or tensor.device != self.device:
            given = f"{tensor.dtype} {list(tensor.shape)} {tensor.stride()} on {tensor.device}"
            raise InvalidArgument(name, given, f"contiguous {dtype} {list(shape)} on {self.device}")
        return int(tensor.data_ptr())

    def optional(self, name: str, tensor: torch.Tensor | None, dtype: torch.dtype, *shape: int) -> int:
        """As check(); 0 for None."""
        return 0 if tensor is None else self.check(name, tensor, dtype, *shape)

    def narrow(self, row_bytes: int, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether 16-byte accesses are not possible."""
        return row_bytes % VECTOR != 0 or any(t.data_ptr() % VECTOR for t in tensors)

    def recv_tensors(self, receipt: Receipt) -> RecvTensors:
        """The tensors that `receipt` gives, and new ones for the rest. Raises InvalidArgument."""
        view, padded = receipt.view, receipt.view == View.PADDED
        if not padded and (receipt.out is not None or receipt.source_map):
            raise InvalidArgument("out, source_map", f"with view {view}", "given with view padded only")
        limit = self.most_rows if receipt.capacity is None else receipt.capacity
        if limit < 0 or (padded and receipt.capacity is not None):
            allowed = "at least 0, and given with view compact or index only"
            raise InvalidArgument("capacity", f"{receipt.capacity} with view {view}", allowed)
        counts, row_ids = receipt.counts, None
        if counts is None:
            counts = torch.empty(self.local, dtype=torch.int32, device=self.device)
        self.check("counts", counts, torch.int32, self.local)
        offsets = torch.empty(self.local + 1, dtype=torch.int64, device=self.device)
        if padded:
            rows, scales = self.empty_padded() if receipt.out is None else self.check_out(receipt.out)
        elif view == View.COMPACT:
            rows, scales = self.empty_compact(limit)
        else:
            rows, scales = torch.empty(0, device=self.device), None
            row_ids = torch.empty(limit, dtype=torch.int64, device=self.device)
        return RecvTensors(rows, scales, row_ids, counts, offsets, limit)

    def source_map(self) -> tuple[torch.Tensor, torch.Tensor]:
        """DeepEP's src_info [E_local, R * max_tokens] and layout_range [E_local, R], not yet written."""
        info = torch.empty((self.local, self.padded), dtype=torch.int32, device=self.device)
        ranges = torch.empty((self.local, self.spec.num_ranks), dtype=torch.int64, device=self.device)
        return info, ranges

    def check_out(self, out: Tensors) -> Tensors:
        """`out`, if it is as empty_padded() makes it."""
        rows, scales = out
        self.check("out rows", rows, self.row_dtype, self.local, self.padded, self.spec.hidden)
        if (scales is not None) != self.fp8:
            raise InvalidArgument("out scales", scales is not None, f"as payload {self.spec.payload} has it")
        if scales is not None:
            shape, plane = (self.local, self.padded, self.groups), self.groups * scales.stride(2)
            good = scales.dtype == self.scale_dtype and tuple(scales.shape) == shape
            if not good or scales.device != self.device or scales.stride()[:2] != (plane, 1):
                raise InvalidArgument("out scales", tuple(scales.shape), "as empty_padded() makes them")
        return out

    def result(self, handle: Handle, out: torch.Tensor | None) -> torch.Tensor:
        """The tensor that a combine fills."""
        shape = (handle.tokens, self.spec.hidden)
        if out is None:
            return torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        self.check("out", out, torch.bfloat16, *shape)
        return out
