from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ep_server.backends.gpu.kernels.triton.embedding import RowTokens, embed
from ep_server.errors import InternalError
from tests.support.triton.harness import DEVICE, NAN, assert_near, random

EPS, NO_TOKEN = 1e-3, -1


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def drawn(*values: int) -> torch.Tensor:
    return ints(*values, dtype=torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("float32", "bfloat16"))
@pytest.mark.parametrize("dim", [64, 100])
def test_rows_of_given_and_of_drawn_tokens(dtype: torch.dtype, dim: int) -> None:
    """A row whose token is drawn does not read its id; one that could not be drawn reads as token 0."""
    embedding, weight = random(9, dim, dtype=dtype, scale=3.0), random(dim, dtype=dtype, seed=1)
    rows = RowTokens(ints(4, 10**9, 8, -5, 0), ints(-1, 2, -1, 0, -7), drawn(NO_TOKEN, 1 << 40, 5))
    residual, out = (torch.full((5, dim), NAN, dtype=dtype, device=DEVICE) for _ in range(2))
    embed(rows, embedding, weight, EPS, residual, out)
    expected = F.embedding(ints(4, 5, 8, 0, 0), embedding)
    assert torch.equal(residual, expected)
    assert_near(out, F.rms_norm(expected.double(), (dim,), weight.double(), EPS))


def test_no_rows() -> None:
    none = random(0, 8)
    embed(RowTokens(ints(), ints(), drawn(3)), random(2, 8), random(8), EPS, none, none)


def test_wrong_inputs_are_named() -> None:
    table, weight, out = random(4, 8), random(8), random(2, 8)
    given = RowTokens(ints(1, 2), ints(-1, -1), drawn(1))
    for name, rows in (
        ("ids", RowTokens(ints(1, 2).long(), given.sources, given.drawn)),
        ("sources", RowTokens(given.ids, ints(0), given.drawn)),
        ("drawn", RowTokens(given.ids, given.sources, ints(1))),
    ):
        with pytest.raises(InternalError, match=rf"^{name}: "):
            embed(rows, table, weight, EPS, out, out)
    with pytest.raises(InternalError, match=r"weight: torch\.bfloat16"):
        embed(given, table, weight.bfloat16(), EPS, out, out)
    with pytest.raises(InternalError, match=r"residual: .*\[2, 8\]"):
        embed(given, table, weight, EPS, random(3, 8), out)
    with pytest.raises(InternalError, match=r"out: .*\[2, 8\]"):
        embed(given, table, weight, EPS, out, random(2, 9))
