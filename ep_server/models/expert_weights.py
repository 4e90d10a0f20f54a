"""Fuses the experts that a rank owns, from either layout on disk: one tensor per expert, or stacked.

FP8 experts stay codes with their scales where the arithmetic takes them: bfloat16 on a GPU, blocks of
128 x 128. Everything else becomes values of the serving dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ep_server.errors import CheckpointError
from ep_server.models.compute import Compute, FfnScales, GatedFfn
from ep_server.models.families.spec import FP8_BLOCK, ModelSpec
from ep_server.models.fp8 import Codes
from ep_server.models.tensors import TensorSource


@dataclass(frozen=True, slots=True)
class ExpertLoader:
    """experts: global ids of this rank's, ascending. dtype: served."""

    source: TensorSource
    spec: ModelSpec
    experts: tuple[int, ...]
    dtype: torch.dtype
    compute: Compute

    def load(self, prefix: str) -> GatedFfn:
        """The experts of the layer whose tensors begin with `prefix`. Raises: what the source raises."""
        spec, names, ffn = self.spec, self.spec.names, self.spec.expert_ffn
        stacked = self.source.has(f"{prefix}.gate_up_proj")
        first = f"{prefix}.{next(iter(self.experts), 0)}.{names.gate}.weight"
        fp8 = self._stay_fp8(f"{prefix}.gate_up_proj" if stacked else first)
        if fp8 and stacked and ffn % FP8_BLOCK:
            raise CheckpointError(
                f"{prefix}.gate_up_proj: a block of {FP8_BLOCK} rows has gate and up rows, as an expert has "
                f"{ffn} channels: such FP8 weights can only be served with model.dtype = float32"
            )
        gate_up, down = self._fused(2, ffn, spec.hidden, fp8), self._fused(1, spec.hidden, ffn, fp8)
        count = spec.router.num_experts
        for row, expert in enumerate(self.experts):
            if stacked:
                gate_up.fill(row, 0, f"{prefix}.gate_up_proj", (count, 2 * ffn, spec.hidden), expert)
                down.fill(row, 0, f"{prefix}.down_proj", (count, spec.hidden, ffn), expert)
                continue
            one = f"{prefix}.{expert}"
            gate_up.fill(row, 0, f"{one}.{names.gate}.weight", (ffn, spec.hidden))
            gate_up.fill(row, 1, f"{one}.{names.up}.weight", (ffn, spec.hidden))
            down.fill(row, 0, f"{one}.{names.down}.weight", (spec.hidden, ffn))
        if gate_up.scale is None or down.scale is None:
            return self.compute.gated_ffn(gate_up.values, down.values)
        return self.compute.gated_ffn(gate_up.values, down.values, FfnScales(gate_up.scale, down.scale))

    def _stay_fp8(self, first: str) -> bool:
        """first: a tensor of the layer; the others must be stored alike."""
        return (
            self.compute.fp8
            and self.dtype is torch.bfloat16
            and self.spec.fp8_blocks
            and self.source.is_fp8(first)
        )

    def _fused(self, parts: int, rows: int, columns: int, fp8: bool) -> _Fused:
        count, device = len(self.experts), self.compute.device
        dtype = torch.float8_e4m3fn if fp8 else self.dtype
        values = torch.empty(count, parts * rows, columns, dtype=dtype, device=device)
        grid = (parts * -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        scale = torch.empty(count, *grid, device=device) if fp8 else None
        return _Fused(self.source, rows, values, scale)


@dataclass(frozen=True, slots=True)
class _Fused:
    """A matrix of every expert in the making. rows: of one part, gate or up; see FfnScales for `scale`."""

    source: TensorSource
    rows: int
    values: torch.Tensor
    scale: torch.Tensor | None

    def fill(self, row: int, part: int, name: str, shape: tuple[int, ...], entry: int | None = None) -> None:
        """Copies a tensor, or one entry of a stack, into expert `row`, from its part `part` on."""
        first = part * self.rows
        into = self.values[row, first : first + shape[-2]]
        if self.scale is None:
            self.source.copy(into, name, shape, entry)
            return
        block = part * -(-self.rows // FP8_BLOCK)
        scale = self.scale[row, block : block + -(-shape[-2] // FP8_BLOCK)]
        self.source.copy_codes(Codes(into, scale), name, shape, entry)
