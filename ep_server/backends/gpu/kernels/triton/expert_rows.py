"""Rows of experts: arguments of the grouped GEMM, the shape of its tiles, and the counts of rows per expert.

The tile tables hold the fastest choices on an H200 for experts of 2048 x 768, BF16 and FP8 (gpu_experts.py
--sweep of benchmarks/).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.launch import FLOATS, FP8, after_previous, block, early, expect
from ep_server.errors import InternalError
from ep_server.exchange.api import Received, View

_MULTIPROCESSORS = 132  # of an H200; fewer only means waves
GROUP = 128  # channels of a row, and rows and columns of a weight, that share a scale


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The rows of E experts; how many each has is on the device. See `ep.exchange.View`.

    rows: COMPACT [N, H], PADDED [E, P, H], INDEX [any, H], which may have a pitch; a weight's dtype or
      float8_e4m3fn.
    counts: [E] int32. offsets: [E + 1] int64, not read for PADDED.
    scales: with float8 rows: float32 [N, H / 128], or [E, P, H / 128]; any strides.
    row_ids: INDEX: [N] int64, which of `rows` each row of the compact order reads.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    scales: torch.Tensor | None = None
    row_ids: torch.Tensor | None = None

    @staticmethod
    def of(received: Received) -> ExpertRows:
        """The rows of a receive. Shares its tensors."""
        if (received.row_ids is not None) != (received.view is View.INDEX):
            raise InternalError(f"row_ids: must be given with view {View.INDEX} only, not {received.view}")
        return ExpertRows(received.rows, received.counts, received.offsets, received.scales, received.row_ids)

    @property
    def padded(self) -> int:
        """Rows an expert has room for; 0 if rows are compact."""
        return self.rows.shape[1] if self.rows.dim() == 3 else 0

    @property
    def most(self) -> int:
        """Upper bound of all experts' rows together, from shapes: the rows of a result."""
        if self.row_ids is not None:
            return len(self.row_ids)
        return self.rows.numel() // max(self.rows.shape[-1], 1)

    def scale_strides(self) -> tuple[int, int, int]:
        """Strides of the scales: between experts (PADDED only), rows, and groups."""
        if self.scales is None:
            return 0, 0, 0
        expert = self.scales.stride(0) if self.padded else 0
        return expert, self.scales.stride(-2), self.scales.stride(-1)

    def check(self, experts: int, hidden: int) -> None:
        """Raises InternalError for shapes, dtypes and layouts that do not fit."""
        kinds, shape = (*FLOATS, FP8), (*([experts, None] if self.padded else [None]), hidden)
        expect("rows", self.rows, kinds, shape, pitch=self.row_ids is not None)
        expect("counts", self.counts, torch.int32, (experts,))
        if not self.padded:
            expect("offsets", self.offsets, torch.int64, (experts + 1,))
        if self.row_ids is not None:
            expect("row_ids", self.row_ids, torch.int64, (None,))
        if (self.scales is not None) != (self.rows.dtype is FP8):
            raise InternalError(f"scales: must be given with {FP8} rows only, rows are {self.rows.dtype}")
        if self.scales is not None:
            shape = (*self.rows.shape[:-1], hidden // GROUP)
            if self.scales.dtype is not torch.float32 or self.scales.shape != shape or hidden % GROUP:
                given = f"{self.scales.dtype} {list(self.scales.shape)}"
                raise InternalError(
                    f"scales: {given}, expected float32 {list(shape)}, one for {GROUP} channels"
                )


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """E gated FFNs: down(silu(gate(x)) * up(x)).

    gate_up: [E, 2 * I, H], gate rows first. down: [E, H, I]. Of one dtype; float8_e4m3fn has scales, float32:
    gate_up_scale: [E, 2 * ceil(I / 128), ceil(H / 128)], gate blocks first.
    down_scale: [E, ceil(H / 128), ceil(I / 128)].
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None

    @property
    def fp8(self) -> bool:
        """Whether weights are codes with a scale per block."""
        return self.gate_up.dtype is FP8

    def check(self) -> None:
        """Raises InternalError for shapes, dtypes and layouts that do not fit."""
        experts, hidden, ffn = self.down.shape
        expect("down", self.down, (*FLOATS, FP8), (None, None, None))
        expect("gate_up", self.gate_up, self.down.dtype, (experts, 2 * ffn, hidden))
        wide, deep = -(-hidden // GROUP), -(-ffn // GROUP)
        for name, scale, shape in (
            ("gate_up_scale", self.gate_up_scale, (experts, 2 * deep, wide)),
            ("down_scale", self.down_scale, (experts, wide, deep)),
        ):
            if (scale is not None) != self.fp8:
                raise InternalError(f"{name}: must be given with {FP8} weights only")
            if scale is not None:
                expect(name, scale, torch.float32, shape)


@dataclass(frozen=True, slots=True)
class Tiles:
    """m, n, k: rows, output channels and input channels of a tile. resident: programs per multiprocessor.

    All programs should run at once: each takes many tiles in turn, so a second wave would double the time.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    resident: int

    @property
    def programs(self) -> int:
        """Programs that run at once on an H200."""
        return _MULTIPROCESSORS * self.resident


def tiles_for(rows_per_expert: int, *, gated: bool, dtype: torch.dtype, fp8: bool = False) -> Tiles:
    """Tiles of a GEMM.

    Args:
        rows_per_expert: expected mean; any number is computed correctly.
        gated: two weight tiles at a time, gate and up. dtype: of the intermediate rows.
        fp8: weights have scales; their sums take twice the registers.
    """
    if dtype is torch.float32:
        return Tiles(16, 32, 32, 4, 2, 2)
    # Room for random deviation from the mean: a second tile reads all weights of an expert again.
    most = rows_per_expert + 2.5 * rows_per_expert**0.5
    n = 64 if gated else 128
    if fp8:
        return _tiles_of_fp8(most, gated)
    if most <= 16:
        return Tiles(16, 128, 128, 4, 3, 1 if gated else 2)
    if most <= 32:
        return Tiles(32, n, 64, 4, 3, 3)
    if most <= 96:
        return Tiles(64, 64, 64, 4, 3, 3 if gated or most > 64 else 4)
    return Tiles(128, n, 64, 8, 4, 1)


def _tiles_of_fp8(most: float, gated: bool) -> Tiles:
    """The fastest tiles on an H200 (docs/design-notes). Each program that reads codes widens them."""
    n = 64 if gated else 128
    if most <= 16:
        return Tiles(16, n, 128, 4, 3, 3)
    if most <= 32:
        return Tiles(32, 64, 128, 4, 3, 3 if gated else 4)
    if most <= 96:
        return Tiles(32, 64, 64, 4, 4, 4) if gated else Tiles(32, 64, 128, 4, 3, 4)
    return Tiles(128, n, 64, 8, 4, 1)


_EXPERTS = 32  # per program


@triton.jit
def _tally_kernel(
    rows, total, active, LAYERS: tl.constexpr, EXPERTS: tl.constexpr, LAYERS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    layer, expert = tl.arange(0, LAYERS_BLOCK)[:, None], tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (layer < LAYERS) & (expert[None, :] < EXPERTS)
    at = rows + layer * EXPERTS + expert[None, :]
    came = tl.load(at, mask=inside, other=0)
    tl.store(at, tl.zeros_like(came), mask=inside)
    sums = total + layer * EXPERTS + expert[None, :]
    tl.store(sums, tl.load(sums, mask=inside, other=0) + came.to(tl.int64), mask=inside)
    some = tl.sum(tl.sum((came != 0).to(tl.int32), axis=0), axis=0)
    tl.atomic_add(active, some.to(tl.int64))


def tally(rows: torch.Tensor, total: torch.Tensor, active: torch.Tensor) -> None:
    """total += rows, active += how many of these are not 0, rows = 0.

    Args:
        rows: [layers, E] int32. total: [layers, E] int64. active: [] int64.
    Raises: InternalError for another shape, dtype or layout.
    """
    expect("rows", rows, torch.int32, (None, None))
    layers, experts = rows.shape
    expect("total", total, torch.int64, (layers, experts))
    expect("active", active, torch.int64, ())
    if rows.numel():
        size = min(block(experts), _EXPERTS)
        _tally_kernel[(-(-experts // size),)](
            rows, total, active, LAYERS=layers, EXPERTS=experts, LAYERS_BLOCK=block(layers), BLOCK=size,
            **early(rows), num_warps=8,
        )  # fmt: skip
