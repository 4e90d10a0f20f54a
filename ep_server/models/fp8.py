"""FP8 weights: e4m3 codes with one float32 scale per block of rows and columns. Knows tensors only."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Codes(NamedTuple):
    """A matrix as it is stored. values: [n, k] float8_e4m3fn. scale: [ceil(n / rows), ceil(k / columns)]
    float32, of blocks of rows x columns."""

    values: torch.Tensor
    scale: torch.Tensor


def widen(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Codes [..., n, k] and the scales of their blocks to float32 [..., n, k]."""
    rows, columns = values.shape[-2:]
    spread = scale.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)
    return values.float() * spread[..., :columns]
