from __future__ import annotations

import pytest
import torch

from ep_server.backends.gpu.kernels.triton.expert_rows import tally
from ep_server.errors import InternalError
from ep_server.models.moe import ExpertCounter
from tests.support.triton.harness import DEVICE


@pytest.mark.parametrize(("layers", "experts"), [(1, 1), (5, 3), (3, 32), (48, 70), (2, 0), (0, 4)])
def test_the_books_of_torch(layers: int, experts: int) -> None:
    """Over steps, with counts of no expert and of all."""
    generator = torch.Generator().manual_seed(experts)
    ours = ExpertCounter(layers, experts, DEVICE, torch.int32, tally)
    expected = ExpertCounter(layers, experts)
    for most in (1, 3, 1 << 30):
        for one, other in zip(ours.rows, expected.rows, strict=True):
            came = torch.randint(0, most, (experts,), generator=generator)
            one.add_(came.to(one.dtype).to(DEVICE))
            other.add_(came)
        ours.finish()
        expected.finish()
        assert torch.equal(ours.total.cpu(), expected.total) and int(ours.active) == int(expected.active)
        assert not any(bool(rows.any()) for rows in ours.rows)
    assert bool(expected.active) == (layers > 0 and experts > 0)


def test_wrong_inputs_are_named() -> None:
    rows = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    total, active = (torch.zeros(size, dtype=torch.int64, device=DEVICE) for size in ((2, 3), ()))
    for name, given in (
        ("rows", (rows.long(), total, active)),
        ("total", (rows, total[:1], active)),
        ("active", (rows, total, total)),
    ):
        with pytest.raises(InternalError, match=f"^{name}: "):
            tally(*given)
