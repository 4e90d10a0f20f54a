"""[6] Attention of one query token per sequence over the paged cache, with each context cut into splits.

    decode   out[s] = softmax(scale * q[s] . K[: lengths[s]]) V[: lengths[s]]     per head

Programs: (sequence, tile of heads, split). The number of splits is a constant of the graph; how much of its
context a split reads follows from the length on the device, and one with nothing to read ends at once.
Splits leave unnormalised sums in a workspace, which a second kernel joins; with one split there is none. A
sequence of length 0 is padding: it gives zeros. Padded block table entries and cache slots are never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.launch import after_previous, block, early, expect, expect_range
from ep_server.backends.gpu.kernels.triton.paged import (
    LOG2_E,
    AttentionRule,
    PagedKv,
    Sequences,
    attend_range,
    attention_shape,
    load_rows,
)

MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """n: positions read at a time."""

    n: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Workspace:
    """Partial results, float32. sums: [S, heads, splits, v_dim]. stats: [.., 2], maximum and sum."""

    sums: torch.Tensor
    stats: torch.Tensor

    @staticmethod
    def of(sequences: int, heads: int, splits: int, v_dim: int, device: torch.device) -> Workspace:
        """Room for a call; one is enough for all layers, which run one after the other."""
        shape = (sequences, heads, splits)
        return Workspace(
            torch.empty(*shape, v_dim, dtype=torch.float32, device=device),
            torch.empty(*shape, 2, dtype=torch.float32, device=device),
        )

    @property
    def splits(self) -> int:
        """Parts that each context is cut into."""
        return self.sums.shape[2]


@triton.jit(do_not_specialize=["blocks_pitch", "splits"])  # they differ from bucket to bucket
def _decode_kernel(
    q, k, v, out, sums, stats, blocks, lengths, k_scale, v_scale, blocks_pitch, scale, splits,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr,
    V_DIM: tl.constexpr, MAIN: tl.constexpr, ROPE: tl.constexpr, MAIN_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, LATENT: tl.constexpr, WINDOW: tl.constexpr,
    FP8: tl.constexpr, M: tl.constexpr, TILE_HEADS: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    sequence, tile, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence).to(tl.int32)
    head_tiles: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    kv_head = tile // head_tiles
    member = (tile % head_tiles) * TILE_HEADS + tl.arange(0, M)
    mine = (member < GROUP) & (tl.arange(0, M) < TILE_HEADS)
    head = sequence * (KV_HEADS * GROUP) + kv_head * GROUP + member
    start = 0
    if WINDOW > 0:
        start = tl.maximum(length - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(length - start, N), splits) * N
    first = start + split * share
    last = tl.minimum(first + share, length)
    query = load_rows(q, head * K_DIM, tl.arange(0, MAIN_BLOCK), mine, MAIN)
    query_rope = query
    if ROPE > 0:
        query_rope = load_rows(q + MAIN, head * K_DIM, tl.arange(0, ROPE_BLOCK), mine, ROPE)
    v_factor = 1.0
    if FP8:
        scale *= tl.load(k_scale + kv_head)
        v_factor = tl.load((k_scale if LATENT else v_scale) + kv_head)
    query_at = tl.zeros((M,), dtype=tl.int32) + (length - 1)
    acc, top, total = attend_range(
        query, query_rope, query_at, first, last, k, v, blocks + sequence * blocks_pitch, kv_head, scale,
        BLOCK_SIZE, KV_HEADS, K_DIM, V_DIM, MAIN, ROPE, MAIN_BLOCK, ROPE_BLOCK, V_BLOCK, LATENT, WINDOW, N,
    )  # fmt: skip
    acc *= v_factor
    channel = tl.arange(0, V_BLOCK)
    inside = mine[:, None] & (channel < V_DIM)[None, :]
    if SPLIT:
        at = head * splits + split
        tl.store(stats + at * 2, top, mask=mine)
        tl.store(stats + at * 2 + 1, total, mask=mine)
        tl.store(sums + at[:, None] * V_DIM + channel[None, :], acc, mask=inside & (total != 0)[:, None])
    else:
        acc /= tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out + head[:, None] * V_DIM + channel[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits"])
def _join_kernel(
    sums, stats, out, splits,
    V_DIM: tl.constexpr, V_BLOCK: tl.constexpr, SPLITS_BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    split, channel = tl.arange(0, SPLITS_BLOCK), tl.arange(0, V_BLOCK)
    at = row * splits + split
    top = tl.load(stats + at * 2, mask=split < splits, other=float("-inf"))
    total = tl.load(stats + at * 2 + 1, mask=split < splits, other=0)
    highest = tl.max(top, axis=0)
    weight = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest))
    whole = tl.sum(total * weight, axis=0)
    acc = load_rows(sums, at * V_DIM, channel, total != 0, V_DIM)  # a split that read nothing left nothing
    joined = tl.sum(acc * weight[:, None], axis=0) / tl.where(whole == 0, 1.0, whole)
    tl.store(out + row * V_DIM + channel, joined.to(out.dtype.element_ty), mask=channel < V_DIM)


def decode(
    q: torch.Tensor,
    kv: PagedKv,
    sequences: Sequences,
    rule: AttentionRule,
    workspace: Workspace,
    out: torch.Tensor,
    tile: DecodeTile | None = None,
) -> None:
    """Attends with one token per sequence, whose key and value are in the cache already.

    Args:
        q: [S, heads, k_dim]. out: [S, heads, v_dim] of q's dtype.
        workspace: of these shapes; its contents are not read. tile: None = tile_for().
    Raises: InternalError for another shape, dtype or layout.
    """
    wide = kv.layer.v is None
    group = max(q.shape[1] // kv.kv_heads, 1)
    shape = attention_shape(q, out, kv, rows=min(block(group, 16), 32 if wide else 64))
    sequences.check()
    count, splits = len(q), workspace.splits
    expect("lengths", sequences.lengths, sequences.lengths.dtype, (count,))
    expect_range("splits", splits, 1, MAX_SPLITS)
    expect("workspace sums", workspace.sums, torch.float32, (count, shape.heads, splits, shape.v_dim))
    expect("workspace stats", workspace.stats, torch.float32, (count, shape.heads, splits, 2))
    if count == 0:
        return
    constants = shape.constants(kv, rule.window)
    tile = tile or tile_for(count * shape.kv_heads, splits, latent=wide)
    _decode_kernel[(count, shape.kv_heads * shape.head_tiles, splits)](
        q, kv.layer.k, kv.layer.v, out, workspace.sums, workspace.stats,
        sequences.blocks, sequences.lengths, kv.k_scale, kv.v_scale,
        sequences.blocks.stride(0), rule.scale * LOG2_E, splits,
        **constants, N=tile.n, SPLIT=splits > 1,
        **early(q, lets_next_start=True), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        join(workspace, out)


def join(workspace: Workspace, out: torch.Tensor) -> None:
    """Adds the splits up. out: [S, heads, v_dim], contiguous; whole heads of the workspace's shape."""
    splits, v_dim = workspace.splits, out.shape[2]
    expect("workspace sums", workspace.sums, torch.float32, (*out.shape[:2], splits, v_dim))
    _join_kernel[(out.shape[0] * out.shape[1],)](
        workspace.sums, workspace.stats, out, splits,
        V_DIM=v_dim, V_BLOCK=block(v_dim, 16), SPLITS_BLOCK=block(splits), **early(out), num_warps=4,
    )  # fmt: skip


def tile_for(rows: int, splits: int, *, latent: bool) -> DecodeTile:
    """Grouped-query: the fastest on an H200 at 256 positions; with few programs each reads more at a time.

    Latent: a guess from shapes. rows: sequences * kv_heads; they are split only if they are few.
    """
    if latent:
        return DecodeTile(32, 8, 2)
    return DecodeTile(128, 4, 3) if splits > 1 or rows <= 512 else DecodeTile(64, 2, 3)


def splits_for(sequences: int, kv_heads: int, num_sms: int, longest: int) -> int:
    """Splits with which a bucket of sequences fills a GPU twice, none shorter than 256 positions."""
    wanted = -(-2 * num_sms // max(sequences * kv_heads, 1))
    return max(min(wanted, longest // 256, MAX_SPLITS), 1)
