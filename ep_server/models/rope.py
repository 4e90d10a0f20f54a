"""Rotary embedding: frequencies, a table over positions, and the rotation as one complex product.

Pairs are always adjacent channels (2i, 2i + 1) here. Checkpoints that pair (i, i + dim / 2) are reordered
at load by `adjacent_pairs`, which changes neither norms nor attention scores. Knows nothing of attention.
"""

from __future__ import annotations

import math

import torch

from ep_server.models.families.spec import RopeSpec, RopeType


def frequencies(spec: RopeSpec) -> torch.Tensor:
    """[dim / 2] float32, radians per position."""
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim
    periods = torch.pow(torch.tensor(spec.theta), exponents)
    if spec.type is RopeType.DEFAULT:
        return 1.0 / periods
    if spec.type is RopeType.LINEAR:
        return 1.0 / periods / spec.factor
    keep = 1.0 - _yarn_ramp(spec)  # 1 = the original frequency, 0 = stretched by the factor
    return (1.0 / (spec.factor * periods)) * (1.0 - keep) + (1.0 / periods) * keep


def rotation_table(spec: RopeSpec, positions: int) -> torch.Tensor:
    """[positions, dim / 2] complex64: what each pair is multiplied with at each position."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies(spec))
    return torch.polar(torch.full_like(angles, spec.attention_factor), angles)


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotates x: [T, heads, dim] by rotation: [T, 1, dim / 2] complex64; computed and returned in float32."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2)


def adjacent_pairs(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Reorders each group of `dim` rows so that rows i and i + dim / 2 become rows 2i and 2i + 1.

    Args:
        rows: [n * dim, ...], a projection, its bias or a norm weight.
    """
    return rows.reshape(-1, 2, dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _yarn_ramp(spec: RopeSpec) -> torch.Tensor:
    """[dim / 2] float32: 0 for channels that turn often in the original context, 1 for slow ones."""

    def channel(turns: float) -> float:
        return spec.dim * math.log(spec.original_context / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = channel(spec.beta_fast), channel(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    high += 0.001 if low == high else 0.0  # a ramp of width 0 divides by 0
    steps = (torch.arange(spec.dim // 2, dtype=torch.float32) - low) / (high - low)
    return steps.clamp(0, 1)
