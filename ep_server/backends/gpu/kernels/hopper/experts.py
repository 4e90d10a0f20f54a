"""[8] The Hopper kernel for the experts of a layer, which streams all their weights.

It takes rows of a COMPACT or INDEX view. Weights are bfloat16, or FP8 codes with a scale for 128 x 128; rows
may be codes where weights are. With codes, a bfloat16 row and the values between the two products are split
into two codes each (csrc/kernels/hopper/experts/split_rows.cuh). Other cases use kernels/triton/experts.py,
which also defines the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ep_server.backends.gpu.capability import native, runs_hopper_kernels
from ep_server.backends.gpu.kernels.triton.expert_rows import ExpertRows, ExpertWeights
from ep_server.backends.gpu.kernels.triton.launch import FP8, expect
from ep_server.errors import InternalError

# Mean rows per expert for weights in codes. With more, Triton's kernels take a fifth more time, but scratch
# memory here is four times theirs (262,144 rows of DeepSeek-V3: 4.6 GiB and 1.0).
MOST_PER_EXPERT = 512
_ROWS_OF_TILE = (32, 48, 64, 96, 128)
_ROWS_OF_WIDE = (160, 128, 96, 192)  # the first of those that read equally much; 192 leave fewest stages
_MANY = 100  # mean rows per expert; with more, tiles are wide
_BUSY = 96  # tiles of the second product; with fewer, too many multiprocessors are idle
_ROWS_OF_CODES = 96  # per tile, at most; 128 were slower on an H200
_FEW = 2  # mean rows per expert; with fewer, too many experts have no rows for reading ahead
_MAX_EXPERTS, _WIDTHS, _FFNS, _FFNS_OF_CODES, _PIECE, _WIDE = 512, 128, 64, 128, 16, 256


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile: at most so many rows of one expert, times 128 weight rows, or 256 if it is wide.

    rows: 32, 48, 64, 96 or, by weights in bfloat16, 128; of a wide one 96, 128, 160 or 192.
    """

    rows: int
    wide: bool = False


class HopperExperts:
    """Holds the weights' addresses and counters on the device: one launch at a time, on any stream.

    The next kernel may be set up while `out` is written: triton/launch.py says what it must do.

    Args:
        weights: bfloat16 or codes, on a Hopper GPU; kept alive. See `hopper_fits`.
    Raises: InternalError for another shape, dtype or layout.
    """

    def __init__(self, weights: ExpertWeights) -> None:
        weights.check()
        self._native, self._weights = native(), weights
        self._most_rows_of_tile = _ROWS_OF_CODES if weights.fp8 else _ROWS_OF_TILE[-1]
        experts, width, ffn = weights.down.shape
        self._experts = self._native.Experts(
            device=weights.down.device.index,
            gate_up=weights.gate_up.data_ptr(),
            down=weights.down.data_ptr(),
            gate_up_scale=_address(weights.gate_up_scale),
            down_scale=_address(weights.down_scale),
            experts=experts,
            width=width,
            ffn=ffn,
        )
        self._wide: bool = self._experts.wide()

    def takes(self, given: ExpertRows, rows_per_expert: int) -> bool:
        """Whether the kernel supports these rows."""
        rows = given.rows
        aligned = rows.data_ptr() % _PIECE == 0 and _pitch(rows) % _PIECE == 0
        stored = rows.dtype is torch.bfloat16 or (rows.dtype is FP8 and self._weights.fp8)
        few = not self._weights.fp8 or rows_per_expert <= MOST_PER_EXPERT
        return stored and aligned and not given.padded and few

    def scratch_bytes(self, most: int) -> int:
        """Scratch of run() for so many rows: rows between the products and, with codes, the split input."""
        found: int = self._experts.scratch_bytes(most)
        return found

    def run(
        self,
        given: ExpertRows,
        scratch: torch.Tensor,
        out: torch.Tensor,
        *,
        rows_per_expert: int,
        tile: Tile | None = None,
    ) -> None:
        """As run_experts(), on the current stream: no copy, no allocation, can be captured.

        Rows beyond given.most and rows with an invalid row id are left out. A failed dispatch may leave any
        numbers, and its own error must be the one that is reported.

        Args:
            given: as `takes` says. scratch: [scratch_bytes(given.most)] uint8. out: [given.most, H]
                bfloat16, contiguous.
            rows_per_expert: expected mean; any number is computed correctly.
            tile: every tile gives the same bits; None = self.tile().
        Raises: InternalError for another shape, dtype or layout. ValueError for an unsupported tile, and for
            more rows, or rows further apart, than the kernel can number.
        """
        _, width, _ = self._weights.down.shape
        given.check(len(self._weights.down), width)
        expect("scratch", scratch, torch.uint8, (self.scratch_bytes(given.most),))
        expect("out", out, torch.bfloat16, (given.most, width))
        if scratch.data_ptr() % _PIECE:
            raise InternalError(
                f"scratch: at {scratch.data_ptr():#x}, must be at a multiple of {_PIECE} bytes"
            )
        _, scale_row, scale_group = given.scale_strides()
        work = self._native.ExpertsWork(
            rows=given.rows.data_ptr(),
            pitch=_pitch(given.rows),
            row_scales=_address(given.scales),
            scale_row=scale_row,
            scale_group=scale_group,
            row_ids=_address(given.row_ids),
            counts=given.counts.data_ptr(),
            offsets=given.offsets.data_ptr(),
            scratch=scratch.data_ptr(),
            out=out.data_ptr(),
            most=given.most,
            held=len(given.rows),
        )
        stream = torch.cuda.current_stream(out.device).cuda_stream
        tile = tile or self.tile(rows_per_expert)
        ahead = reads_ahead(rows_per_expert, tile.rows)
        self._experts.run(stream, work, rows_of_tile=tile.rows, wide=tile.wide, reads_ahead=ahead)

    def reads_ahead(self, rows_per_expert: int) -> bool:
        """Whether weights are read before rows arrive, see reads_ahead()."""
        return reads_ahead(rows_per_expert, self.tile(rows_per_expert).rows)

    def tile(self, rows_per_expert: int) -> Tile:
        """The tile that run() uses for so many rows."""
        wide = None
        if self._wide and rows_per_expert > _MANY:
            experts, width, _ = self._weights.down.shape
            wide = wide_tile(rows_per_expert, experts * width // _WIDE)
        return wide or narrow_tile(rows_per_expert, self._most_rows_of_tile)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _pitch(rows: torch.Tensor) -> int:
    """Bytes between two rows."""
    return rows.stride(-2) * rows.element_size()


def narrow_tile(rows_per_expert: int, most: int = _ROWS_OF_TILE[-1]) -> Tile:
    """Rows of a tile, up to `most`, with room for random deviation from the mean: a second tile reads all
    weights again."""
    enough = (rows for rows in _ROWS_OF_TILE if _most_by_chance(rows_per_expert) <= rows <= most)
    return Tile(next(enough, most))


def wide_tile(rows_per_expert: int, down_tiles: int) -> Tile | None:
    """The tile that reads least and keeps multiprocessors busy, if any does.

    down_tiles: of all experts together.
    """

    def reads(rows: int) -> int:
        """Rows of weights and of the expert, for a tile of weight rows; chunks of an expert are equal."""
        likely = rows_per_expert + math.isqrt(rows_per_expert)
        chunks = -(-likely // rows)
        return chunks * (_WIDE + -(-likely // chunks))

    busy = [n for n in _ROWS_OF_WIDE if -(-rows_per_expert // n) * down_tiles >= _BUSY]
    return Tile(min(busy, key=reads), wide=True) if busy else None


def _most_by_chance(rows_per_expert: int) -> float:
    return rows_per_expert + 2.5 * math.sqrt(rows_per_expert)


def reads_ahead(rows_per_expert: int, most: int = _ROWS_OF_TILE[-1]) -> bool:
    """Whether weights are read before it is known which experts have rows, as if each had a tile of at most
    `most` rows."""
    return rows_per_expert > _FEW and _most_by_chance(rows_per_expert) <= most


def hopper_fits(weights: ExpertWeights) -> bool:
    """Whether there is a kernel for these weights on their device."""
    down = weights.down
    stored = down.dtype is torch.bfloat16 or weights.fp8
    return stored and fits(weights) and runs_hopper_kernels(down.device)


def fits(weights: ExpertWeights) -> bool:
    """Whether tiles fit the sizes. A rank without experts has none."""
    experts, width, ffn = weights.down.shape
    ffns = _FFNS_OF_CODES if weights.fp8 else _FFNS
    return 1 <= experts <= _MAX_EXPERTS and width % _WIDTHS == 0 and ffn % ffns == 0
