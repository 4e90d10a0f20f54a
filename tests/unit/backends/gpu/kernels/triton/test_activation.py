from __future__ import annotations

import pytest
import torch

from ep_server.backends.gpu.kernels.triton.experts import silu_mul
from ep_server.errors import InternalError
from tests.support.triton.harness import DEVICE, NAN, assert_near, poisoned, random


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(3, 40), (2, 1500), (1, 1), (0, 8)])
def test_silu_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    """Rows lie in wider ones of NaN; large gates saturate, as they must."""
    x = poisoned(random(rows, 2 * width, dtype=dtype, scale=4.0), 3)
    if rows:
        x[0, 0] = -200.0
    out = torch.full((rows, width), NAN, dtype=dtype, device=DEVICE)
    silu_mul(x, out)
    gate, up = x.double().chunk(2, dim=1)
    assert_near(out, torch.nn.functional.silu(gate) * up)


def test_wrong_inputs_are_named() -> None:
    with pytest.raises(InternalError, match="gate_up"):
        silu_mul(random(2, 9), random(2, 4))
