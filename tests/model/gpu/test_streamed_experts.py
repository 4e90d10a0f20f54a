"""Which rows and weights the experts' kernel for Hopper is for; what it computes needs one (tests/gpu)."""

from __future__ import annotations

import pytest
import torch

from ep_server.model.gpu.streamed_experts import MOST_PER_EXPERT, reads_ahead, rows_of_tile, streamable
from ep_server.model.triton.expert_rows import ExpertWeights


@pytest.mark.parametrize(
    ("each", "rows"), [(0, 32), (1, 32), (16, 32), (21, 64), (32, 64), (46, 64), (47, 128), (128, 128)]
)
def test_tiles_have_room_for_what_chance_puts_beyond_the_mean(each: int, rows: int) -> None:
    assert rows_of_tile(each) == rows


def test_weights_are_read_ahead_where_few_experts_are_without_rows() -> None:
    assert [reads_ahead(each) for each in (0, 2, 3, MOST_PER_EXPERT)] == [False, False, True, True]


def test_rows_that_are_for_the_other_kernels_are_not_read_ahead_for() -> None:
    assert not reads_ahead(MOST_PER_EXPERT + 1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_kernel_without_a_gpu(device: str) -> None:
    gate_up = torch.empty(2, 256, 256, dtype=torch.bfloat16, device=device)
    assert not streamable(
        ExpertWeights(gate_up, torch.empty(2, 256, 128, dtype=torch.bfloat16, device=device))
    )
