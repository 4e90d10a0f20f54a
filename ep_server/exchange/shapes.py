"""The tensors of one rank of an exchange on one device: shape and dtype of each view, of outputs and results.

Allocates and checks; moves no data. See api.Received for what the tensors hold.
"""

from __future__ import annotations

import torch

from ep_server.errors import InvalidArgument
from ep_server.exchange.api import RecvOptions, View
from ep_server.exchange.quant import scale_columns, scale_dtype
from ep_server.exchange.spec import FP8, ExchangeSpec
from ep_server.exchange.validate import CPU, check_tensor, fits, input_dtype

Tensors = tuple[torch.Tensor, torch.Tensor | None]  # rows, scales
VECTOR = 16  # bytes of one access of a GPU
VIEWS = {View.COMPACT: 0, View.PADDED: 1, View.INDEX: 2}  # the numbers of csrc/exchange/common/params.hpp


class Shapes:
    """Sizes and new tensors.

    Args:
        aligned: each column of PADDED scales starts at a multiple of 16 bytes, as kernels of a GPU write it.
    """

    def __init__(self, spec: ExchangeSpec, device: torch.device = CPU, *, aligned: bool = False) -> None:
        self.spec, self.device, self._aligned = spec, device, aligned
        self.combine_dtype = input_dtype(spec)
        self.fp8 = spec.payload in FP8
        self.row_dtype = torch.float8_e4m3fn if self.fp8 else self.combine_dtype
        self.scale_dtype, self.groups = scale_dtype(spec.payload), scale_columns(spec.hidden, spec.payload)
        self.num_local = len(spec.local_experts)
        self.padded_rows = spec.num_ranks * spec.max_tokens
        self.most_rows = self.padded_rows * min(spec.top_k, self.num_local)  # of a compact view
        words = VECTOR // 4
        self.scale_pitch = -(-self.padded_rows // words) * words if aligned else self.padded_rows
        # New tensors like these: the cheapest way to make one.
        self._int32 = torch.empty(0, dtype=torch.int32, device=device)
        self._int64 = torch.empty(0, dtype=torch.int64, device=device)
        self._rows = torch.empty(0, dtype=self.row_dtype, device=device)
        self._results = torch.empty(0, dtype=self.combine_dtype, device=device)
        self._scales = torch.empty(0, dtype=self.scale_dtype, device=device)

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
        data = self._rows.new_empty((rows, self.spec.hidden))
        return data, self._scales.new_empty((rows, self.groups)) if self.fp8 else None

    def padded(self) -> Tensors:
        """[E_local, R * max_tokens, H] and their scales, tokens contiguous; not yet written."""
        data = self._rows.new_empty((self.num_local, self.padded_rows, self.spec.hidden))
        if not self.fp8:
            return data, None
        plane = self._scales.new_empty((self.num_local, self.groups, self.scale_pitch))
        return data, plane.transpose(1, 2)[:, : self.padded_rows]

    def source_map(self) -> tuple[torch.Tensor, torch.Tensor]:
        """src_info and layout_range of RecvOptions.source_map, not yet written."""
        info = self._int32.new_empty((self.num_local, self.padded_rows))
        return info, self._int64.new_empty((self.num_local, self.spec.num_ranks))

    def check_recv(self, view: View, options: RecvOptions) -> None:
        """Raises InvalidArgument for tensors that a receive in this view cannot fill."""
        out, source_map = options.get("out"), options.get("source_map")
        if view is not View.PADDED and (out is not None or source_map is not None):
            raise InvalidArgument("out, source_map", f"with view {view}", "given with view padded only")
        capacity, most = options.get("capacity"), options.get("most_tokens")
        if capacity is not None and (capacity < 0 or view is View.PADDED):
            allowed = "at least 0, and given with view compact or index only"
            raise InvalidArgument("capacity", f"{capacity} with view {view}", allowed)
        if most is not None and most < 0:
            raise InvalidArgument("most_tokens", most, "at least 0")
        if (counts := options.get("counts")) is not None:
            check_tensor("counts", counts, self.device, torch.int32, E_local=self.num_local)
        if (stats := options.get("expert_stats")) is not None:
            check_tensor("expert_stats", stats, self.device, torch.int32, E_local=self.num_local)
        self.check_wait_stats(options.get("wait_stats"))
        if source_map is not None:
            padded = {"E_local": self.num_local, "R*max_tokens": self.padded_rows}
            check_tensor("src_info", source_map[0], self.device, torch.int32, **padded)
            sizes = {"E_local": self.num_local, "R": self.spec.num_ranks}
            check_tensor("layout_range", source_map[1], self.device, torch.int64, **sizes)
        if out is not None:
            self._check_out(*out)

    def check_wait_stats(self, stats: torch.Tensor | None) -> None:
        """Raises InvalidArgument unless it is None or [R] int64."""
        if stats is not None:
            check_tensor("wait_stats", stats, self.device, torch.int64, R=self.spec.num_ranks)

    def check_outputs(self, expert_out: torch.Tensor, view: View, rows: int) -> None:
        """Raises InvalidArgument unless outputs are in the layout of `view`. rows: N; unused if PADDED."""
        if view is not View.PADDED and fits(
            expert_out, self.device, self.combine_dtype, (rows, self.spec.hidden)
        ):
            return
        sizes = {"N": rows}
        if view is View.PADDED:
            sizes = {"E_local": self.num_local, "R*max_tokens": self.padded_rows}
        check_tensor("expert_out", expert_out, self.device, self.combine_dtype, **sizes, H=self.spec.hidden)

    def result(self, tokens: int, out: torch.Tensor | None) -> torch.Tensor:
        """[T, H] that a combine fills: `out` if given. Raises InvalidArgument."""
        shape = (tokens, self.spec.hidden)
        if out is None:
            return self._results.new_empty(shape)
        if not fits(out, self.device, self.combine_dtype, shape):
            check_tensor("out", out, self.device, self.combine_dtype, T=tokens, H=self.spec.hidden)
        return out

    def _check_out(self, rows: torch.Tensor, scales: torch.Tensor | None) -> None:
        """Native code writes through these pointers: raises InvalidArgument unless they are like padded()."""
        sizes = {"E_local": self.num_local, "R*max_tokens": self.padded_rows}
        check_tensor("out rows", rows, self.device, self.row_dtype, **sizes, H=self.spec.hidden)
        if (scales is not None) != self.fp8:
            given = "none" if scales is None else "a tensor"
            raise InvalidArgument("out scales", given, f"as payload {self.spec.payload} has it")
        if scales is None:
            return
        pitch = scales.stride(2) if self._aligned and scales.dim() == 3 else self.scale_pitch
        good = scales.dtype == self.scale_dtype and scales.device == self.device
        shape, strides = (self.num_local, self.padded_rows, self.groups), (self.groups * pitch, 1, pitch)
        if not good or tuple(scales.shape) != shape or scales.stride() != strides:
            raise InvalidArgument("out scales", tuple(scales.shape), "as empty_padded() makes them")
