"""The tensors that a receive fills or shows: one shape per View, for one rank of one exchange.

Knows shapes, dtypes and the receive region; moves no data. See exchange.Received for what they hold.
"""

from __future__ import annotations

import torch

from ep_server import _C
from ep_server.errors import InvalidArgument
from ep_server.exchange.api import ExchangeSpec, Payload, View
from ep_server.exchange.geometry import FP8
from ep_server.exchange.validate import check_tensor, fits

GROUP, PACKED_GROUP = 128, 512  # channels per float32 scale, per int32 of four UE8M0 scales
Tensors = tuple[torch.Tensor, torch.Tensor | None]  # rows, scales


class Views:
    """Makes the tensors of each view.

    Args:
        region: uint8, this rank's dispatch rows of all banks; where the ranks of a host share rows, from the
          first one's to the last one's.
    """

    def __init__(self, spec: ExchangeSpec, layout: _C.Layout, region: torch.Tensor) -> None:
        self.spec = spec
        self.combine_dtype = torch.float32 if spec.payload == Payload.FP32 else torch.bfloat16
        self.fp8 = spec.payload in FP8
        self.row_dtype = torch.float8_e4m3fn if self.fp8 else self.combine_dtype
        ue8m0 = spec.payload == Payload.FP8_UE8M0
        self.scale_dtype = torch.int32 if ue8m0 else torch.float32
        self.groups = spec.hidden // (PACKED_GROUP if ue8m0 else GROUP)
        self.num_local = len(spec.local_experts)
        self.padded_rows = spec.num_ranks * spec.max_tokens
        self._indexed_rows = (
            self.padded_rows + (region.numel() - layout.combine + layout.rows) // layout.row_pitch
        )
        # New tensors like these: the cheapest way to make one.
        self._int32, self._int64 = torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int64)
        self._banks = [self._bank(layout, region, bank) for bank in range(spec.num_banks)]

    def counts(self) -> torch.Tensor:
        """[E_local] int32, not yet written."""
        return self._int32.new_empty(self.num_local)

    def offsets(self) -> torch.Tensor:
        """[E_local + 1] int64, not yet written."""
        return self._int64.new_empty(self.num_local + 1)

    def row_ids(self, rows: int) -> torch.Tensor:
        """[rows] int64, not yet written."""
        return self._int64.new_empty(rows)

    def compact(self, rows: int) -> Tensors:
        """[rows, H] and their scales, not yet written."""
        data = torch.empty((rows, self.spec.hidden), dtype=self.row_dtype)
        return data, torch.empty((rows, self.groups), dtype=self.scale_dtype) if self.fp8 else None

    def padded(self) -> Tensors:
        """[E_local, R * max_tokens, H] and their scales, tokens contiguous; not yet written."""
        data = torch.empty((self.num_local, self.padded_rows, self.spec.hidden), dtype=self.row_dtype)
        if not self.fp8:
            return data, None
        shape = (self.num_local, self.groups, self.padded_rows)
        return data, torch.empty(shape, dtype=self.scale_dtype).transpose(1, 2)

    def index(self, bank: int) -> Tensors:
        """[R * max_tokens or more, H] of one bank and their scales, in place."""
        return self._banks[bank]

    def check_out(self, view: View, out: Tensors) -> None:
        """Native code writes through these pointers: raises InvalidArgument unless they are like padded()."""
        if view != View.PADDED:
            raise InvalidArgument("out", str(view), "given with view padded only")
        rows, scales = out
        names = {"E_local": self.num_local, "R*max_tokens": self.padded_rows}
        check_tensor("out rows", rows, self.row_dtype, **names, H=self.spec.hidden)
        if (scales is not None) != self.fp8:
            given = "none" if scales is None else "a tensor"
            raise InvalidArgument("out scales", given, f"as payload {self.spec.payload} has it")
        if scales is not None:
            plane = scales.transpose(1, 2)
            names = {"E_local": self.num_local, "groups": self.groups, "R*max_tokens": self.padded_rows}
            check_tensor("out scales, transposed", plane, self.scale_dtype, **names)

    def check_expert_out(self, view: View, expert_out: torch.Tensor, rows: int) -> None:
        """Raises InvalidArgument unless `expert_out` has the layout that `view` was received in."""
        hidden = self.spec.hidden
        if view is not View.PADDED and fits(expert_out, self.combine_dtype, (rows, hidden)):
            return
        if view == View.PADDED:
            names = {"E_local": self.num_local, "R*max_tokens": self.padded_rows}
            check_tensor("expert_out", expert_out, self.combine_dtype, **names, H=hidden)
        else:
            check_tensor("expert_out", expert_out, self.combine_dtype, N=rows, H=hidden)

    def _bank(self, layout: _C.Layout, region: torch.Tensor, bank: int) -> Tensors:
        pitch, begin = layout.row_pitch, layout.row_at(bank, 0, 0) - layout.rows
        block = region[begin : begin + self._indexed_rows * pitch].view(self._indexed_rows, pitch)
        rows = block[:, : layout.row_bytes].view(self.row_dtype)
        if not self.fp8:
            return rows, None
        end = layout.scale_offset + layout.scale_bytes
        return rows, block[:, layout.scale_offset : end].view(self.scale_dtype)
