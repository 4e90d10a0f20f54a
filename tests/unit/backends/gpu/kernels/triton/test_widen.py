"""Blocks of codes against torch's conversion of each code, bit for bit. Unwritten memory stays NaN."""

from __future__ import annotations

import pytest
import torch

from ep_server.backends.gpu.kernels.triton.paged import PagedKv
from ep_server.backends.gpu.kernels.triton.widen import widen_blocks
from ep_server.errors import InternalError
from ep_server.models.kv_cache import KvLayer
from tests.support.triton.harness import DEVICE, FP8, NAN

BF16, BLOCKS, ROOM = torch.bfloat16, 9, 6


def cache_of(block_size: int, kv_heads: int, dim: int) -> PagedKv:
    """Each of the 256 codes, NaN included, in every few blocks."""
    shape = (BLOCKS, block_size, kv_heads, dim)
    numbers = torch.arange(BLOCKS * block_size * kv_heads * dim) * 37 % 256
    k = numbers.to(torch.uint8).view(shape).to(DEVICE)
    v = (255 - k).contiguous()
    scale = torch.rand(kv_heads, device=DEVICE)
    return PagedKv(KvLayer(k.view(FP8), v.view(FP8), dim), scale, scale)


def room_of(kv: PagedKv, blocks: int = ROOM) -> KvLayer:
    shape = (blocks, *kv.layer.k.shape[1:])
    return KvLayer(*(torch.full(shape, NAN, dtype=BF16, device=DEVICE) for _ in "kv"), kv.layer.v_dim)


def bits(x: torch.Tensor) -> torch.Tensor:
    """NaN is equal to NaN, whatever its bits."""
    return torch.where(x.isnan(), torch.full_like(x, NAN), x).view(torch.int16)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("shape", [(16, 4, 128), (8, 1, 128), (8, 3, 128), (4, 2, 16)], ids=str)
@pytest.mark.parametrize("blocks", [(7,), (3, 0, 8), (1, 2, 3, 4, 5)], ids=len)
@pytest.mark.parametrize("programs", [1, 5])
def test_codes_become_their_numbers(
    shape: tuple[int, int, int], blocks: tuple[int, ...], programs: int
) -> None:
    kv = cache_of(*shape)
    wide, named = room_of(kv), integers(*blocks, *[1 << 30] * (ROOM - len(blocks)))
    widen_blocks(kv, named, integers(len(blocks)), wide, programs)
    assert kv.layer.v is not None and wide.v is not None
    for codes, numbers in ((kv.layer.k, wide.k), (kv.layer.v, wide.v)):
        assert torch.equal(bits(numbers[: len(blocks)]), bits(codes[list(blocks)].to(BF16)))
        assert bool(numbers[len(blocks) :].isnan().all())


def test_every_code_is_exact() -> None:
    kv = cache_of(16, 1, 16)
    wide = room_of(kv)
    widen_blocks(kv, integers(0, *[0] * (ROOM - 1)), integers(1), wide, 1)
    codes = kv.layer.k[0].flatten()
    assert len(set(codes.view(torch.uint8).tolist())) == 256
    finite = ~codes.float().isnan()
    assert int(finite.sum()) == 254
    assert torch.equal(wide.k[0].flatten()[finite].double(), codes[finite].double())


def test_no_blocks() -> None:
    kv = cache_of(8, 1, 128)
    wide = room_of(kv)
    widen_blocks(kv, integers(*[1 << 30] * ROOM), integers(0), wide, 3)
    assert bool(wide.k.isnan().all())


def test_other_caches_are_refused() -> None:
    kv = cache_of(8, 1, 128)
    named, one = integers(*range(ROOM)), integers(1)
    with pytest.raises(InternalError, match=r"cache k: torch\.bfloat16"):
        widen_blocks(PagedKv(room_of(kv)), named, one, room_of(kv), 1)
    with pytest.raises(InternalError, match=r"wide k: .*expected contiguous torch\.bfloat16"):
        widen_blocks(kv, named, one, room_of(kv, ROOM + 1), 1)
    with pytest.raises(InternalError, match="has no v"):
        widen_blocks(PagedKv(KvLayer(kv.layer.k, None, 64)), named, one, room_of(kv), 1)
