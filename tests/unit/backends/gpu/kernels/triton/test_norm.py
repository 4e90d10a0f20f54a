from __future__ import annotations

import pytest
import torch

from ep_server.backends.gpu.kernels.triton.norm import add_rms_norm, rms_norm
from ep_server.backends.gpu.kernels.triton.partial import Partial
from ep_server.errors import InternalError
from tests.support.triton.harness import DEVICE, NAN, assert_near, in_parts, poisoned, random

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("float32", "bfloat16"))
EPS = 1e-3


def oracle(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@each_dtype
@pytest.mark.parametrize(
    ("rows", "shape"), [(3, (64,)), (2, (100,)), (2, (3, 21)), (1, (1,)), (0, (8,)), (0, (2, 8))]
)
def test_rms_norm(dtype: torch.dtype, rows: int, shape: tuple[int, ...]) -> None:
    """Rows lie in wider ones, whose rest is NaN; what lies behind a row of `out` is not touched."""
    width = shape[0] if len(shape) == 1 else shape[0] * shape[1]
    x = poisoned(random(rows, width, dtype=dtype, scale=3.0), 5).unflatten(1, shape)
    weight = random(*shape, dtype=dtype, seed=1)
    wide = torch.full((rows, width + 3), NAN, dtype=dtype, device=DEVICE)
    out = wide[:, :width].unflatten(1, shape)
    rms_norm(x, weight, EPS, out)
    assert_near(out, oracle(x, weight))
    assert bool(wide[:, width:].isnan().all())


def test_rms_norm_in_place() -> None:
    x = random(3, 40)
    expected = oracle(x, torch.ones(40, device=DEVICE))
    rms_norm(x, torch.ones(40, device=DEVICE), EPS, x)
    assert_near(x, expected)


@each_dtype
@pytest.mark.parametrize(("rows", "dim"), [(3, 70), (1, 128), (0, 8)])
def test_add_rms_norm(dtype: torch.dtype, rows: int, dim: int) -> None:
    """The norm reads the rounded sum, as a later layer does."""
    x = poisoned(random(rows, dim, dtype=dtype), 3)
    residual, weight = random(rows, dim, dtype=dtype, seed=1, scale=8.0), random(dim, dtype=dtype, seed=2)
    total = x + residual
    out = torch.empty_like(residual)
    add_rms_norm(x, residual, weight, EPS, out)
    assert torch.equal(residual, total)
    assert_near(out, oracle(total, weight))
    again = torch.empty_like(out)
    rms_norm(total, weight, EPS, again)
    assert torch.equal(out, again)


@each_dtype
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_add_rms_norm_of_partial_sums(dtype: torch.dtype, parts: int) -> None:
    """As of the product, rounded once."""
    x, product = in_parts(parts, 3, 72)
    residual, weight = random(3, 72, dtype=dtype, seed=1, scale=8.0), random(72, dtype=dtype, seed=2)
    stream, wanted = residual + product.to(dtype), torch.empty_like(residual)
    add_rms_norm(product.to(dtype), residual.clone(), weight, EPS, wanted)
    out = torch.full_like(residual, NAN)
    add_rms_norm(x, residual, weight, EPS, out)
    assert torch.equal(residual, stream)
    assert_near(out, wanted.double())


@each_dtype
@pytest.mark.parametrize("parts", [0, 2])
def test_add_rms_norm_of_two_branches(dtype: torch.dtype, parts: int) -> None:
    """As of their sum, rounded; the first one may be partial sums, and where the result goes."""
    first: torch.Tensor | Partial = poisoned(random(3, 70, dtype=dtype), 3)
    rounded = first
    if parts:
        first, product = in_parts(parts, 3, 70)
        rounded = product.to(dtype)
    more, weight = random(3, 70, dtype=dtype, seed=5), random(70, dtype=dtype, seed=2)
    residual = random(3, 70, dtype=dtype, seed=1, scale=8.0)
    stream, wanted = residual.clone(), torch.empty_like(residual)
    add_rms_norm(rounded + more, stream, weight, EPS, wanted)
    out = first if isinstance(first, torch.Tensor) else torch.full_like(residual, NAN)
    add_rms_norm(first, residual, weight, EPS, out, more)
    assert torch.equal(residual, stream) and torch.equal(out, wanted)


def test_no_rows_of_partial_sums() -> None:
    none = random(0, 8)
    add_rms_norm(Partial(random(3, 0, 8)), none, random(8), EPS, none)


def test_a_row_with_nan_stays_alone() -> None:
    x = random(3, 33)
    x[1, 7] = NAN
    out = torch.empty_like(x)
    rms_norm(x, torch.ones(33, device=DEVICE), EPS, out)
    assert out.isnan().all(dim=1).tolist() == [False, True, False]


def test_wrong_inputs_are_named() -> None:
    x, weight = random(2, 8), random(8)
    with pytest.raises(
        InternalError, match=r"out: torch.float32 \[3, 8\].*expected rows of contiguous .* \[2, 8\]"
    ):
        rms_norm(x, weight, EPS, torch.empty(3, 8, device=DEVICE))
    with pytest.raises(InternalError, match=r"weight: torch\.bfloat16"):
        rms_norm(x, weight.bfloat16(), EPS, x)
    with pytest.raises(InternalError, match="x: "):
        rms_norm(random(8, 2).t(), weight, EPS, x)
    with pytest.raises(InternalError, match=r"x: torch.float32 \[2, 3, 8\].*\[any, 2, 8\]"):
        add_rms_norm(Partial(random(2, 3, 8)), random(2, 8), weight, EPS, x)
    with pytest.raises(InternalError, match=r"x: torch.bfloat16 .*torch.float32"):
        add_rms_norm(Partial(random(2, 2, 8).bfloat16()), random(2, 8), weight, EPS, x)
    with pytest.raises(InternalError, match="residual"):
        add_rms_norm(x, random(2, 10)[:, :8], weight, EPS, x)
    with pytest.raises(InternalError, match=r"more: .*\[3, 8\]"):
        add_rms_norm(x, random(2, 8), weight, EPS, x, random(3, 8))
    with pytest.raises(InternalError, match="dim = 40000"):
        rms_norm(random(1, 40000), random(40000), EPS, random(1, 40000))
