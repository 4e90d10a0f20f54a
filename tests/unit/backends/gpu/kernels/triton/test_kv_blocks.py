"""KV blocks are gathered and scattered byte by byte, whatever their dtype and width."""

from __future__ import annotations

import pytest
import torch

from ep_server.backends.gpu.kernels.triton.kv_blocks import gather_blocks, scatter_blocks
from ep_server.backends.gpu.kv_copies import runs
from ep_server.errors import InternalError
from tests.support.triton.harness import DEVICE

BLOCKS, PARTS = 7, 3


def cache_of(width: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(width)
    return [
        torch.randint(256, (BLOCKS, width), dtype=torch.uint8, generator=made).to(DEVICE)
        for _ in range(PARTS)
    ]


@pytest.mark.parametrize("width", [8, 12, 7, 9216])
def test_blocks_move_there_and_back(width: int) -> None:
    cache, target = cache_of(width), [torch.zeros_like(part) for part in cache_of(width)]
    blocks, others = torch.tensor([5, 0, 6], device=DEVICE), torch.tensor([1, 4, 2], device=DEVICE)
    buffer = torch.zeros((4, PARTS, width), dtype=torch.uint8, device=DEVICE)
    gather_blocks(addresses(cache), blocks, buffer)
    assert all(torch.equal(buffer[:3, part], cache[part][blocks]) for part in range(PARTS))
    assert not buffer[3].any()
    scatter_blocks(addresses(target), others, buffer)
    for part in range(PARTS):
        assert torch.equal(target[part][others], cache[part][blocks])
        assert not target[part][[0, 3, 5, 6]].any()


def test_a_short_buffer_is_refused() -> None:
    cache = cache_of(8)
    buffer = torch.zeros((1, PARTS, 8), dtype=torch.uint8, device=DEVICE)
    with pytest.raises(InternalError, match="buffer"):
        gather_blocks(addresses(cache), torch.tensor([1, 2], device=DEVICE), buffer)


def test_neighbouring_slots_are_one_copy() -> None:
    assert runs([3, 4, 5, 8, 10, 11]) == [(0, 3, 3), (3, 8, 1), (4, 10, 2)]
    assert runs([]) == []


def addresses(cache: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([part.data_ptr() for part in cache], device=DEVICE)
