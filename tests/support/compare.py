"""Compares tensors bit for bit or within bounds, and says where they differ.

Knows nothing of ranks. A difference is described by the positions of NaNs, the largest absolute and
relative error and the worst index, so that a failing case can be read without a debugger.
"""

from __future__ import annotations

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SHOWN = 4  # positions listed before "..."


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers of their width, so -0 differs from 0 and a NaN equals itself."""
    return tensor.contiguous().clone().view(_BITS[tensor.element_size()])


def difference(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """An empty text where both are equal bit for bit, else one line that says how they differ."""
    if actual.dtype != expected.dtype:
        return f"dtype {actual.dtype}, expected {expected.dtype}"
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    wrong = bits(actual) != bits(expected)
    if not wrong.any():
        return ""
    return f"{int(wrong.sum())} of {wrong.numel()} elements differ: " + describe(actual, expected, wrong)


def describe(actual: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor) -> str:
    """Where `wrong` is set: first positions, NaNs on either side, largest errors, worst index."""
    a, e = actual.double(), expected.double()
    only_actual, only_expected = a.isnan() & ~e.isnan(), e.isnan() & ~a.isnan()
    error = (a - e).abs().nan_to_num(nan=0.0)
    relative = (error / e.abs()).nan_to_num(nan=0.0, posinf=0.0)
    at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    return (
        f"at {_positions(wrong)}; NaN only in actual at {_positions(only_actual)}, only in expected at "
        f"{_positions(only_expected)}; max abs {error.max():.4g}, max rel {relative.max():.4g}; "
        f"worst {list(at)}: {a[at]:.8g}, expected {e[at]:.8g}"
    )


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Fails unless both hold the same bits, dtype and shape."""
    found = difference(actual, expected)
    assert not found, f"{what}: {found}"


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str, *, abs_tol: float) -> None:
    """Fails where any element is off by more than `abs_tol`, or NaN."""
    wrong = ~((actual.double() - expected.double()).abs() <= abs_tol)
    assert not wrong.any(), f"{what}: {describe(actual, expected, wrong)}"


def _positions(mask: torch.Tensor) -> str:
    found = mask.nonzero().tolist()
    return str(found[:SHOWN])[1:-1] + ("..." if len(found) > SHOWN else "") if found else "none"
