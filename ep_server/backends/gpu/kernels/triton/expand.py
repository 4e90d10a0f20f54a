"""[6] Expands cached latents to each head's keys and values, which the Hopper kernel for chunks reads.

    k[h, p] = key_up[h] @ latent(p)     v[h, p] = latent(p) @ value_up[h]     rope[p] = key that heads share

A tile is TILE positions of a sequence and lies in one piece, whatever the size of the cache's blocks. With an
FP8 cache, codes are expanded as numbers; their scale is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.launch import after_previous, early, expect, expect_range
from ep_server.backends.gpu.kernels.triton.paged import PagedKv
from ep_server.errors import InternalError

TILE = 128  # positions
_STEP = 64  # channels of latents that a program multiplies at a time


@dataclass(frozen=True, slots=True)
class ExpandedKv:
    """Keys and values of some heads.

    k: [heads, positions, nope_dim]. v: [heads, positions, v_dim]. rope: [positions, rope_dim], of all heads.
    """

    k: torch.Tensor
    v: torch.Tensor
    rope: torch.Tensor


@triton.jit(do_not_specialize_on_alignment=["blocks", "count"])
def _expand_kernel(
    cache, key_up, value_up, k, v, rope, blocks, count, room,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, LATENT: tl.constexpr, NOPE: tl.constexpr,
    ROPE: tl.constexpr, V_DIM: tl.constexpr, POSITIONS: tl.constexpr, STEP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Any number of programs share the (tile, head) pairs. room: positions of k, v and rope."""
    after_previous(EARLY)
    position, latent_channel = tl.arange(0, POSITIONS), tl.arange(0, STEP)
    key, value, turned = tl.arange(0, NOPE), tl.arange(0, V_DIM), tl.arange(0, ROPE)
    dtype: tl.constexpr = k.dtype.element_ty
    for item in range(tl.program_id(0), tl.load(count) * HEADS, tl.num_programs(0)):
        tile, head = item // HEADS, item % HEADS
        place = tile * POSITIONS + position
        page = tl.load(blocks + place // BLOCK_SIZE).to(tl.int64)
        row = cache + (page * BLOCK_SIZE + position % BLOCK_SIZE) * (LATENT + ROPE)
        keys = tl.zeros((POSITIONS, NOPE), dtype=tl.float32)
        values = tl.zeros((POSITIONS, V_DIM), dtype=tl.float32)
        for at in range(0, LATENT, STEP):
            channel = at + latent_channel
            latents = tl.load(row[:, None] + channel[None, :]).to(dtype)
            up = tl.load(key_up + (head * NOPE + key)[:, None] * LATENT + channel[None, :])
            keys = tl.dot(latents, tl.trans(up), keys, input_precision="ieee")
            up = tl.load(value_up + (head * LATENT + channel)[:, None] * V_DIM + value[None, :])
            values = tl.dot(latents, up, values, input_precision="ieee")
        to = place.to(tl.int64) + head * room
        tl.store(k + to[:, None] * NOPE + key[None, :], keys.to(dtype))
        tl.store(v + to[:, None] * V_DIM + value[None, :], values.to(dtype))
        if head == 0:
            shared = tl.load((row + LATENT)[:, None] + turned[None, :]).to(dtype)
            tl.store(rope + place.to(tl.int64)[:, None] * ROPE + turned[None, :], shared)


def expand_blocks(
    kv: PagedKv,
    blocks: torch.Tensor,
    count: torch.Tensor,
    key_up: torch.Tensor,
    value_up: torch.Tensor,
    to: ExpandedKv,
    programs: int,
) -> None:
    """Fills the first count[0] tiles of `to`. Block number i of the cache's `blocks` is part of tile
    i // (TILE / block_size).

    Args:
        kv: latents; blocks of a power of two of at most TILE positions. blocks: [N] int32, valid to the end
          of the last tile; count: [1] int32.
        key_up: [heads, nope_dim, kv_lora]; value_up: [heads, kv_lora, v_dim]: of the heads of `to`.
        to: room for N * block_size positions, of the weights' dtype; all widths are powers of two.
        programs: to launch.
    Raises: InternalError for another shape, dtype or layout.
    """
    heads, nope, latent = key_up.shape
    room, rope, v_dim = len(to.rope), to.rope.shape[1], value_up.shape[2]
    size, k = kv.block_size, kv.layer.k
    if kv.layer.v is not None:
        raise InternalError("expanded blocks: the cache has a v")
    expect("cache k", k, k.dtype, (None, size, 1, latent + rope))
    expect("blocks", blocks, torch.int32, (room // size,))
    expect("count", count, torch.int32, (1,))
    expect("key_up", key_up, to.k.dtype, (heads, nope, latent))
    expect("value_up", value_up, to.k.dtype, (heads, latent, v_dim))
    expect("expanded k", to.k, to.k.dtype, (heads, room, nope))
    expect("expanded v", to.v, to.k.dtype, (heads, room, v_dim))
    expect("expanded rope", to.rope, to.k.dtype, (room, rope))
    expect_range("positions of a tile beyond whole blocks", TILE % size + room % TILE, 0, 0)
    _expand_kernel[(programs,)](
        k, key_up, value_up, to.k, to.v, to.rope, blocks, count, room,
        BLOCK_SIZE=size, HEADS=heads, LATENT=latent, NOPE=nope, ROPE=rope, V_DIM=v_dim, POSITIONS=TILE,
        STEP=min(_STEP, latent), **early(k), num_warps=8, num_stages=3,
    )  # fmt: skip
