"""[8] The experts of a layer in one kernel for Hopper: all their weights as one stream (csrc/experts).

It takes bfloat16 rows of a COMPACT or INDEX view, few for each expert, as decode has them; for everything
else there are the two kernels of model/triton/experts.py, which also say what is computed.
"""

from __future__ import annotations

import math

import torch

from ep_server.model.gpu.capability import native, runs_hopper_kernels
from ep_server.model.triton.checks import expect
from ep_server.model.triton.expert_rows import ExpertRows, ExpertWeights

MOST_PER_EXPERT = 512  # rows, on average: beyond, a library's larger tiles are as fast
_ROWS_OF_TILE = (32, 48, 64, 96, 128)
_FEW = 2  # rows, on average: with fewer, too many experts have none for weights to be read ahead
_MAX_EXPERTS, _WIDTHS, _FFNS, _PIECE = 512, 128, 64, 16


class StreamedExperts:
    """Holds the weights' addresses and counters on the device: one launch at a time, on any stream.

    The kernel behind may be set up while `out` is written: triton/early.py has what it must do.

    Args:
        weights: bfloat16, on a Hopper GPU; kept alive. See `streamable`.
    Raises: InternalError for another shape, dtype or layout.
    """

    def __init__(self, weights: ExpertWeights) -> None:
        weights.check()
        self._native, self._weights = native(), weights
        experts, width, ffn = weights.down.shape
        self._experts = self._native.Experts(
            device=weights.down.device.index,
            gate_up=weights.gate_up.data_ptr(),
            down=weights.down.data_ptr(),
            experts=experts,
            width=width,
            ffn=ffn,
        )

    def takes(self, given: ExpertRows, rows_per_expert: int) -> bool:
        """Whether the kernel is for such rows."""
        aligned = given.rows.data_ptr() % _PIECE == 0 and given.rows.stride(-2) * 2 % _PIECE == 0
        compact = not given.padded and given.rows.dtype is torch.bfloat16
        return compact and aligned and rows_per_expert <= MOST_PER_EXPERT

    def run(
        self, given: ExpertRows, hidden: torch.Tensor, out: torch.Tensor, *, rows_per_expert: int
    ) -> None:
        """As run_experts(), on the current stream: no copy, no allocation, can be captured.

        Rows that counts say beyond given.most, and rows whose number in row_ids is none, are left out: a
        dispatch that failed leaves any numbers, and its error must be the one that is heard.

        Args:
            given: as `takes` says. hidden: [given.most, I] and out: [given.most, H], bfloat16, contiguous.
            rows_per_expert: to expect; any number is computed correctly.
        Raises: InternalError for another shape, dtype or layout.
        """
        _, width, ffn = self._weights.down.shape
        given.check(len(self._weights.down), width)
        expect("hidden", hidden, torch.bfloat16, (given.most, ffn))
        expect("out", out, torch.bfloat16, (given.most, width))
        address = 0 if given.row_ids is None else given.row_ids.data_ptr()
        work = self._native.ExpertsWork(
            rows=given.rows.data_ptr(),
            pitch=given.rows.stride(-2) * 2,
            row_ids=address,
            counts=given.counts.data_ptr(),
            offsets=given.offsets.data_ptr(),
            hidden=hidden.data_ptr(),
            out=out.data_ptr(),
            most=given.most,
            held=len(given.rows),
        )
        stream = torch.cuda.current_stream(out.device).cuda_stream
        self._experts.run(stream, work, rows_of_tile(rows_per_expert), reads_ahead(rows_per_expert))


def rows_of_tile(rows_per_expert: int) -> int:
    """With room for what chance puts beyond the mean: a second tile reads all weights of an expert again."""
    most = _most_by_chance(rows_per_expert)
    return next((rows for rows in _ROWS_OF_TILE if most <= rows), _ROWS_OF_TILE[-1])


def _most_by_chance(rows_per_expert: int) -> float:
    return rows_per_expert + 2.5 * math.sqrt(rows_per_expert)


def reads_ahead(rows_per_expert: int) -> bool:
    """Whether weights are read before it is known which experts have rows: as if each had a tile of them."""
    return rows_per_expert > _FEW and _most_by_chance(rows_per_expert) <= _ROWS_OF_TILE[-1]


def streamable(weights: ExpertWeights) -> bool:
    """Whether there is a kernel for these weights on their device."""
    down = weights.down
    return down.dtype is torch.bfloat16 and fits(weights) and runs_hopper_kernels(down.device)


def fits(weights: ExpertWeights) -> bool:
    """Whether tiles fit the sizes. A rank without experts has none."""
    experts, width, ffn = weights.down.shape
    return 1 <= experts <= _MAX_EXPERTS and width % _WIDTHS == 0 and ffn % _FFNS == 0
