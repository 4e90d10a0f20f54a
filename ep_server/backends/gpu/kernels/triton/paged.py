"""The paged KV cache as kernels take it, its FP8 codes, and attention of one tile of queries.

    code  = rne_e4m3(clamp(x / scale, +-448))     a NaN stays a NaN
    value = float32(code) * scale

Decode and prefill share the tile. Its rows are (token, head) pairs of one KV head. Scores are in units of
log2, so the running maximum and the sum belong to exp2. Keys have two parts: MAIN channels and, for latent
attention, ROPE more; there the MAIN part also holds the values and is loaded once. Loads mask positions
outside the range: unwritten cache memory, and block table entries past a sequence's end, may hold anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.launch import FLOATS, FP8, INTEGERS, block, expect
from ep_server.errors import InternalError
from ep_server.models.kv_cache import KvLayer


@dataclass(frozen=True, slots=True)
class PagedKv:
    """One layer's cache, of the queries' dtype or float8_e4m3fn.

    layer: k: [blocks, block_size, kv_heads, k_dim]; v likewise, or None: values are the first v_dim channels
      of k. A position's heads and channels are contiguous.
    k_scale, v_scale: [kv_heads] float32, with an FP8 cache only; v_scale only where the layer has a v.
    """

    layer: KvLayer
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def fp8(self) -> bool:
        """Whether the cache holds codes with a scale."""
        return self.layer.k.dtype is FP8

    @property
    def block_size(self) -> int:
        """Positions in a block."""
        return self.layer.k.shape[1]

    @property
    def kv_heads(self) -> int:
        """Heads of keys; 1 for latent attention."""
        return self.layer.k.shape[2]

    def check(self) -> None:
        """Raises InternalError for a cache that the kernels cannot address."""
        k, v = self.layer.k, self.layer.v
        expect("cache k", k, (*FLOATS, FP8), (None, None, None, None))
        if v is not None:
            expect("cache v", v, k.dtype, (*k.shape[:3], self.layer.v_dim))
        for name, scale, needed in (
            ("k_scale", self.k_scale, self.fp8),
            ("v_scale", self.v_scale, self.fp8 and v is not None),
        ):
            if (scale is not None) != needed:
                raise InternalError(f"{name}: must be {'given' if needed else 'None'} with a {k.dtype} cache")
            if scale is not None:
                expect(name, scale, torch.float32, (self.kv_heads,))


@triton.jit
def to_code(x, scale):
    """Converts x: float32 to the codes of an FP8 cache."""
    return tl.clamp(x / scale, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


LOG2_E = 1.4426950408889634


@triton.jit
def load_rows(base, row_at, channel, row_ok, WIDTH: tl.constexpr):
    """[rows, channels] of a matrix by the offsets of its rows; zeros outside."""
    inside = row_ok[:, None] & (channel < WIDTH)[None, :]
    return tl.load(base + row_at[:, None] + channel[None, :], mask=inside, other=0.0)


@triton.jit
def attend_range(
    q, q_rope, query_at, first, last, k, v, table, kv_head, scale,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    MAIN: tl.constexpr, ROPE: tl.constexpr, MAIN_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, LATENT: tl.constexpr, WINDOW: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Softmax attention of a tile over positions first .. last - 1, each row up to its own position.

    q: [M, MAIN_BLOCK], q_rope: [M, ROPE_BLOCK] or unused. query_at: [M], position of each row's token.
    Returns: acc [M, V_BLOCK], maximum [M] (-inf: nothing seen), sum [M], float32.
    """
    m: tl.constexpr = q.shape[0]
    channel, rope_channel, v_channel = (
        tl.arange(0, MAIN_BLOCK),
        tl.arange(0, ROPE_BLOCK),
        tl.arange(0, V_BLOCK),
    )
    acc = tl.zeros((m, V_BLOCK), dtype=tl.float32)
    top = tl.full((m,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((m,), dtype=tl.float32)
    for start in range(first, last, N):
        position = start + tl.arange(0, N)
        inside = position < last
        page = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        row = (page * BLOCK_SIZE + position % BLOCK_SIZE) * KV_HEADS + kv_head
        keys = load_rows(k, row * K_DIM, channel, inside, MAIN).to(q.dtype)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if ROPE > 0:
            ropes = load_rows(k + MAIN, row * K_DIM, rope_channel, inside, ROPE).to(q.dtype)
            scores = tl.dot(q_rope, tl.trans(ropes), scores, input_precision="ieee")
        seen = inside[None, :] & (position[None, :] <= query_at[:, None])
        if WINDOW > 0:
            seen &= position[None, :] > query_at[:, None] - WINDOW
        scores = tl.where(seen, scores * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: no inf - inf
        p = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(p, axis=1)
        values = keys
        if not LATENT:
            values = load_rows(v, row * V_DIM, v_channel, inside, V_DIM).to(q.dtype)
        acc = tl.dot(p.to(q.dtype), values, acc * fade[:, None], input_precision="ieee")
        top = higher
    return acc, top, total


@dataclass(frozen=True, slots=True)
class Sequences:
    """The positions of each sequence in the cache; all on the device.

    blocks: [S, W] int32 or int64, rows may have a pitch; entries past a sequence's length are not read.
    lengths: [S] int32 or int64, positions each attends to, its own included; 0 = padding.
    """

    blocks: torch.Tensor
    lengths: torch.Tensor

    def check(self) -> None:
        """Raises InternalError for another shape, dtype or layout."""
        expect("lengths", self.lengths, INTEGERS, (None,))
        expect("blocks", self.blocks, INTEGERS, (len(self.lengths), None), pitch=True)


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """scale: of the scores. window: positions visible backwards, 0 = all."""

    scale: float
    window: int = 0


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """How heads and channels are cut into tiles. `rows`: per tile; see module docstring for the parts."""

    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    latent: bool
    rows: int

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.kv_heads

    @property
    def tile_heads(self) -> int:
        """Heads of one tile."""
        return min(self.group, self.rows)

    @property
    def head_tiles(self) -> int:
        """Tiles that cover a group."""
        return -(-self.group // self.tile_heads)

    def constants(self, kv: PagedKv, window: int) -> dict[str, int | bool]:
        """The constants for which the kernels of both files are compiled."""
        main = self.v_dim if self.latent else self.k_dim
        rope = self.k_dim - main
        return {
            "BLOCK_SIZE": kv.block_size,
            "KV_HEADS": self.kv_heads,
            "GROUP": self.group,
            "K_DIM": self.k_dim,
            "V_DIM": self.v_dim,
            "MAIN": main,
            "ROPE": rope,
            "MAIN_BLOCK": block(main, 16),
            "ROPE_BLOCK": block(rope, 16),
            "V_BLOCK": block(self.v_dim, 16),
            "LATENT": self.latent,
            "WINDOW": window,
            "FP8": kv.fp8,
            "M": self.rows,
            "TILE_HEADS": self.tile_heads,
        }


def attention_shape(q: torch.Tensor, out: torch.Tensor, kv: PagedKv, rows: int) -> AttentionShape:
    """The checked shape of a call. q: [T, heads, k_dim], out: [T, heads, v_dim]. Raises InternalError."""
    kv.check()
    layer, kv_heads = kv.layer, kv.kv_heads
    expect("q", q, FLOATS, (None, None, layer.k.shape[3]))
    expect("out", out, q.dtype, (*q.shape[:2], layer.v_dim))
    if not kv.fp8 and layer.k.dtype != q.dtype:
        raise InternalError(f"cache: {layer.k.dtype}, must be of q's {q.dtype} or {torch.float8_e4m3fn}")
    if kv.fp8 and (q.shape[2] % 8 or layer.v_dim % 8):
        # A compiled prefill over rows of 20 bytes read wrong values on an H200 (Triton 3.6).
        raise InternalError(f"FP8 cache: {q.shape[2]} and {layer.v_dim} channels, must be multiples of 8")
    heads = q.shape[1]
    if heads % kv_heads or heads == 0:
        raise InternalError(f"q: {heads} heads, must be a multiple of {kv_heads} KV heads")
    return AttentionShape(heads, kv_heads, q.shape[2], layer.v_dim, layer.v is None, rows)
