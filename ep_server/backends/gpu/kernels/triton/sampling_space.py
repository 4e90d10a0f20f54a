"""Room that the kernels of sampling.py and sampling_report.py use from one to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.checks import block, expect, expect_range
from ep_server.backends.gpu.kernels.triton.sampling_weights import block_of

MAX_SPLITS = 128
_SPLITS = 16
_CANDIDATES = 2048
_GROUPS = 128
LEADERS = tl.constexpr(8)  # highest keys of a row that are tried
LOWEST = tl.constexpr(-3.4028234663852886e38)  # a threshold that every finite logit reaches


@dataclass(frozen=True, slots=True)
class SamplingSpace:
    """For N rows or fewer, cut into splits.

    values, ids: [N, splits] float32, int32; the best of a split. peaks: [N, splits, groups] float32.
    highest, threshold, cutoff: [N] float32; cutoff is told of rows with top-k or top-p only.
    counts: [N] int32; candidates, perhaps more than there is room for.
    listed, listed_ids: [N, most] float32, int32; candidates in any order: all logits >= threshold.
    masses, ones: [N, splits] int64; sums of weights at the row's temperature, and at temperature 1.
    open_rows: [N] int32; 1 where candidates are not enough. For these, see sampling_nucleus.py:
    keys, key_ids, above: [N, splits, LEADERS] float32, int32, int64. rest: [N, splits] float32.
    """

    values: torch.Tensor
    ids: torch.Tensor
    peaks: torch.Tensor
    highest: torch.Tensor
    threshold: torch.Tensor
    cutoff: torch.Tensor
    counts: torch.Tensor
    listed: torch.Tensor
    listed_ids: torch.Tensor
    masses: torch.Tensor
    ones: torch.Tensor
    open_rows: torch.Tensor
    keys: torch.Tensor
    key_ids: torch.Tensor
    rest: torch.Tensor
    above: torch.Tensor

    @staticmethod
    def of(rows: int, vocab: int, splits: int, device: torch.device) -> SamplingSpace:
        """Any number of splits gives the same tokens."""

        def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(rows, *shape, dtype=dtype, device=device)

        int32, int64 = torch.int32, torch.int64
        leaders = LEADERS.value
        groups, most = min(_GROUPS, block_of(vocab)), min(_CANDIDATES, block(vocab))
        return SamplingSpace(
            made(splits), made(splits, dtype=int32), made(splits, groups),
            made(), made(), made(), made(dtype=int32), made(most), made(most, dtype=int32),
            made(splits, dtype=int64), made(splits, dtype=int64),
            made(dtype=int32), made(splits, leaders), made(splits, leaders, dtype=int32), made(splits),
            made(splits, leaders, dtype=int64),
        )  # fmt: skip

    @property
    def splits(self) -> int:
        """Programs that share a row."""
        return self.values.shape[1]

    @property
    def most(self) -> int:
        """Candidates that there is room for."""
        return self.listed.shape[1]

    def check(self, rows: int, vocab: int) -> None:
        """Raises InternalError for more rows, another vocabulary, or too many splits."""
        expect_range("splits", self.splits, 1, MAX_SPLITS)
        expect_range("rows", rows, 0, len(self.values))
        expect("listed", self.listed, torch.float32, (None, min(_CANDIDATES, block(vocab))))


def splits_of(vocab: int) -> int:
    """Programs for a row of that many tokens, each with a tile or more."""
    return max(min(_SPLITS, -(-vocab // block_of(vocab))), 1)
