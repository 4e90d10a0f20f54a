"""Inputs and comparisons of the kernel tests. Every oracle is plain torch in float64.

Without a GPU the kernels run in Triton's interpreter, on CPU tensors; with one, compiled, on it.
"""

from __future__ import annotations

import os

import torch

from ep_server.backends.gpu.kernels.triton.partial import Partial
from tests.support.triton.interpreter import make_exact
from tests.support.triton.quick import make_quick

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
if INTERPRETED:
    make_exact()
    make_quick()
NAN = float("nan")
FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}


def random(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0
) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(dtype).to(DEVICE)


def poisoned(x: torch.Tensor, more: int) -> torch.Tensor:
    """x with rows of a pitch: its last dimension is a view of a wider tensor, whose rest is NaN."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + more), NAN, dtype=x.dtype, device=x.device)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def in_parts(parts: int, rows: int, width: int, scale: float = 1.0) -> tuple[Partial, torch.Tensor]:
    """A product as partial sums, and as these add up in order: [rows, width] float32."""
    sums = random(parts, rows, width, seed=parts, scale=scale)
    total = sums[0].clone()
    for part in sums[1:]:
        total += part
    return Partial(sums), total


def assert_near(got: torch.Tensor, expected: torch.Tensor, factor: float = 1.0) -> None:
    """Within `factor` roundings of got's dtype, relative to 1 + |expected|."""
    assert got.shape == expected.shape
    difference = (got.double() - expected).abs()
    allowed = TOLERANCE[got.dtype] * factor * (1 + expected.abs())
    assert bool((difference <= allowed).all()), float((difference / allowed).max())


def codes(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """What an FP8 cache stores of x."""
    return (x.float() / scale).clamp(-448, 448).to(FP8)


def assert_same_codes(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, or neighbours where a value fell next to the middle of two codes."""
    a, b = (x.view(torch.uint8).to(torch.int16) for x in (got, expected))
    assert got.shape == expected.shape and bool(((a - b).abs() <= 1).all())
    assert bool(((a != b).float().mean() < 0.02).all())
