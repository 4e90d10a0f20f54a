"""[6] Attention of several query tokens per sequence over the paged cache: chunked prefill, or mixed.

    out[t] = softmax(scale * q[t] . K[: position(t) + 1]) V[: position(t) + 1]     per head

The keys and values of the chunk itself are in the cache before the call. Programs: (tile of tokens, tile of
heads); a tile holds tokens of one sequence. Which sequence a program has follows from `query_start` on the
device; the grid is the most tiles that T tokens of S sequences can need, and programs past the last one end
at once. Rows past query_start[S] are padding: neither read nor written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.launch import expect, expect_range, find_tile, tile_counts
from ep_server.backends.gpu.kernels.triton.paged import (
    LOG2_E,
    AttentionRule,
    PagedKv,
    Sequences,
    attend_range,
    attention_shape,
    load_rows,
)

MAX_SEQUENCES = 4096
_SEQUENCES = 64  # sequences whose tiles a program counts at a time


# These change from step to step and must not cause another compilation.
@triton.jit(
    do_not_specialize=["blocks_pitch", "count"],
    do_not_specialize_on_alignment=["query_start", "blocks", "lengths"],
)
def _prefill_kernel(
    q, k, v, out, query_start, blocks, lengths, k_scale, v_scale, blocks_pitch, count, scale,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr,
    V_DIM: tl.constexpr, MAIN: tl.constexpr, ROPE: tl.constexpr, MAIN_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, LATENT: tl.constexpr, WINDOW: tl.constexpr,
    FP8: tl.constexpr, M: tl.constexpr, TILE_HEADS: tl.constexpr, N: tl.constexpr,
    SOME: tl.constexpr,
):  # fmt: skip
    tile_tokens: tl.constexpr = M // TILE_HEADS
    tile, before = tl.program_id(0), 0
    sequence, local = tile * 0, tile * 0
    for at in range(0, count, SOME):
        part = at + tl.arange(0, SOME)
        begins = tl.load(query_start + part, mask=part < count, other=0)
        tiles = tile_counts(tl.load(query_start + part + 1, mask=part < count, other=0) - begins, tile_tokens)
        index, inside_it = find_tile(tiles, tile - before)
        after = before + tl.sum(tiles, axis=0)
        here = (tile >= before) & (tile < after)
        sequence = tl.where(here, at + index, sequence)
        local = tl.where(here, inside_it, local)
        before = after
    if tile >= before:
        return
    begin = tl.load(query_start + sequence).to(tl.int32)
    tokens = tl.load(query_start + sequence + 1).to(tl.int32) - begin
    length = tl.load(lengths + sequence).to(tl.int32)
    head_tiles: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    kv_head = tl.program_id(1) // head_tiles
    row = tl.arange(0, M)
    member = (tl.program_id(1) % head_tiles) * TILE_HEADS + row % TILE_HEADS
    token = local * tile_tokens + row // TILE_HEADS
    mine = (member < GROUP) & (row < tile_tokens * TILE_HEADS) & (token < tokens)
    at = (begin + token).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + member
    query = load_rows(q, at * K_DIM, tl.arange(0, MAIN_BLOCK), mine, MAIN)
    query_rope = query
    if ROPE > 0:
        query_rope = load_rows(q + MAIN, at * K_DIM, tl.arange(0, ROPE_BLOCK), mine, ROPE)
    v_factor = 1.0
    if FP8:
        scale *= tl.load(k_scale + kv_head)
        v_factor = tl.load((k_scale if LATENT else v_scale) + kv_head)
    past = length - tokens  # position of the chunk's first token
    last = past + tl.minimum((local + 1) * tile_tokens, tokens)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(past + local * tile_tokens + 1 - WINDOW, 0)
    acc, _, total = attend_range(
        query, query_rope, past + token, first, last, k, v, blocks + sequence.to(tl.int64) * blocks_pitch,
        kv_head, scale,
        BLOCK_SIZE, KV_HEADS, K_DIM, V_DIM, MAIN, ROPE, MAIN_BLOCK, ROPE_BLOCK, V_BLOCK, LATENT, WINDOW, N,
    )  # fmt: skip
    acc *= v_factor / tl.where(total == 0, 1.0, total)[:, None]
    channel = tl.arange(0, V_BLOCK)
    inside = mine[:, None] & (channel < V_DIM)[None, :]
    tl.store(out + at[:, None] * V_DIM + channel[None, :], acc.to(out.dtype.element_ty), mask=inside)


def prefill(
    q: torch.Tensor,
    query_start: torch.Tensor,
    kv: PagedKv,
    sequences: Sequences,
    rule: AttentionRule,
    out: torch.Tensor,
) -> None:
    """Attends with the tokens of S chunks, whose keys and values are in the cache already.

    Args:
        q: [T, heads, k_dim]. out: [T, heads, v_dim] of q's dtype.
        query_start: [S + 1] int32 or int64, ascending offsets of each sequence's rows; the last is at most T.
        sequences: a length counts the chunk's own tokens, and is at least their number.
    Raises: InternalError for another shape, dtype or layout.
    """
    latent = kv.layer.v is None
    shape = attention_shape(q, out, kv, rows=32 if latent else 64)
    sequences.check()
    count = len(sequences.lengths)
    expect("query_start", query_start, query_start.dtype, (count + 1,))
    expect_range("sequences", count, 0, MAX_SEQUENCES)
    tokens = len(q)
    if tokens == 0 or count == 0:
        return
    tiles = tokens // (shape.rows // shape.tile_heads) + min(count, tokens)
    _prefill_kernel[(tiles, shape.kv_heads * shape.head_tiles)](
        q, kv.layer.k, kv.layer.v, out, query_start, sequences.blocks, sequences.lengths,
        kv.k_scale, kv.v_scale, sequences.blocks.stride(0), count, rule.scale * LOG2_E,
        **shape.constants(kv, rule.window), N=32 if latent else 64, SOME=_SEQUENCES,
        num_warps=8 if latent else 4, num_stages=2,
    )  # fmt: skip
