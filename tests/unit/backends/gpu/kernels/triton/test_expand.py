"""Tiles of latents as keys and values of each head, against torch in float64. Unused memory stays NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ep_server.backends.gpu.kernels.triton.expand import TILE, ExpandedKv, expand_blocks
from ep_server.backends.gpu.kernels.triton.paged import PagedKv
from ep_server.errors import InternalError
from ep_server.models.kv_cache import KvLayer
from tests.support.triton.harness import DEVICE, FP8, NAN, TOLERANCE, codes, random

BF16, F32 = torch.bfloat16, torch.float32
HEADS, NOPE, ROPE, V_DIM, LATENT, ROOM = 3, 16, 8, 32, 128, 3  # ROOM: tiles
SCALE = torch.tensor([0.25], device=DEVICE)


def cache_of(block_size: int, blocks: int, dtype: torch.dtype) -> PagedKv:
    rows = random(blocks, block_size, 1, LATENT + ROPE, seed=3)
    rows = codes(rows, SCALE) if dtype is FP8 else rows.to(dtype)
    return PagedKv(KvLayer(rows, None, LATENT), SCALE if dtype is FP8 else None)


def room_of(dtype: torch.dtype = BF16) -> ExpandedKv:
    shapes = (HEADS, ROOM * TILE, NOPE), (HEADS, ROOM * TILE, V_DIM), (ROOM * TILE, ROPE)
    return ExpandedKv(*(torch.full(shape, NAN, dtype=dtype, device=DEVICE) for shape in shapes))


def ups(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    key_up = random(HEADS, NOPE, LATENT, dtype=dtype, seed=1, scale=0.1)
    return key_up, random(HEADS, LATENT, V_DIM, dtype=dtype, seed=2, scale=0.1)


def named(*blocks: int, block_size: int) -> torch.Tensor:
    """With numbers far outside behind them."""
    room = ROOM * TILE // block_size
    return torch.tensor([*blocks, *[1 << 30] * (room - len(blocks))], dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("block_size", [8, 16, 64, 128])
@pytest.mark.parametrize("cached", [BF16, FP8, F32], ids=str)
@pytest.mark.parametrize(("tiles", "programs"), [(1, 1), (2, 5)])
def test_latents_become_keys_and_values(
    block_size: int, cached: torch.dtype, tiles: int, programs: int
) -> None:
    dtype = F32 if cached is F32 else BF16
    count = tiles * TILE // block_size
    kv, to, (key_up, value_up) = cache_of(block_size, count + 2, cached), room_of(dtype), ups(dtype)
    order = torch.randperm(count + 2, generator=torch.Generator().manual_seed(5))[:count].tolist()
    blocks = named(*order, block_size=block_size)
    number = torch.tensor([tiles], dtype=torch.int32, device=DEVICE)
    expand_blocks(kv, blocks, number, key_up, value_up, to, programs)
    rows = kv.layer.k[order].flatten(0, 2)
    used, latents = tiles * TILE, rows[:, :LATENT].double()
    for made, wanted in (
        (to.k, torch.einsum("pl,hnl->hpn", latents, key_up.double())),
        (to.v, torch.einsum("pl,hlv->hpv", latents, value_up.double())),
    ):
        error = (made[:, :used].double() - wanted).abs().max() / wanted.abs().max()
        assert float(error) <= TOLERANCE[dtype]
        assert bool(made[:, used:].isnan().all())
    assert torch.equal(to.rope[:used], rows[:, LATENT:].to(dtype)) and bool(to.rope[used:].isnan().all())


def test_no_tiles() -> None:
    kv, to = cache_of(16, 2, BF16), room_of()
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    expand_blocks(kv, named(block_size=16), none, *ups(BF16), to, 3)
    assert bool(to.k.isnan().all() & to.v.isnan().all() & to.rope.isnan().all())


def test_other_caches_and_blocks_are_refused() -> None:
    kv, to, up = cache_of(16, 2, BF16), room_of(), ups(BF16)
    blocks, one = named(block_size=16), torch.ones(1, dtype=torch.int32, device=DEVICE)
    whole = replace(kv.layer, v=kv.layer.k)
    with pytest.raises(InternalError, match="has a v"):
        expand_blocks(PagedKv(whole), blocks, one, *up, to, 1)
    with pytest.raises(InternalError, match=r"expanded v: .*expected contiguous torch\.bfloat16"):
        expand_blocks(kv, blocks, one, *up, replace(to, v=to.v[1:]), 1)
    with pytest.raises(InternalError, match="blocks: "):
        expand_blocks(kv, blocks[1:], one, *up, to, 1)
    with pytest.raises(InternalError, match="beyond whole blocks"):
        expand_blocks(cache_of(48, 2, BF16), named(block_size=48), one, *up, to, 1)
