"""[8] Grouped GEMMs of the experts on received rows, in two kernels, and the gate of a dense FFN.

    gate_up   hidden = silu(x @ gate.T) * (x @ up.T), float32 inside, rounded once
    down      out = hidden @ down.T
    silu_mul  out = silu(gate) * up of products by a library, float32 inside

The number of rows per expert is known on the device only. A program takes tile after tile, (rows of one
expert) x (output channels), until the counts are used up, so unfilled capacity costs no launch. Rows past a
count are neither read nor written. An invalid row number, left by a row lost after its header, reads as
zeros. Where values have scales, products of 128 input channels are summed in float32, then scaled. FP8 rows
multiply FP8 weights as codes, and other weights as values rounded to their dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.expert_rows import (
    GROUP,
    ExpertRows,
    ExpertWeights,
    Tiles,
    tiles_for,
)
from ep_server.backends.gpu.kernels.triton.launch import (
    FLOATS,
    after_previous,
    block,
    early,
    expect,
    find_tile,
    tile_counts,
)
from ep_server.errors import InternalError


@triton.jit
def _load(base, row_at, row_ok, k, WIDTH: tl.constexpr, K: tl.constexpr):
    """[rows, K] channels from k on; zeros outside."""
    column = k + tl.arange(0, K)
    at = base + row_at[:, None] + column[None, :]
    if WIDTH % K == 0:
        tile = tl.load(at, mask=row_ok[:, None], other=0.0)
    else:
        tile = tl.load(at, mask=row_ok[:, None] & (column < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def _product(acc, x, x_scale, w, w_scale, DTYPE: tl.constexpr, X_FP8: tl.constexpr, W_FP8: tl.constexpr):
    """acc + x @ w.T. x_scale: [M], w_scale: [N], read where the side is FP8. DTYPE: of products of values."""
    if X_FP8 and W_FP8:
        acc += tl.dot(x, tl.trans(w)) * x_scale[:, None] * w_scale[None, :]
    elif W_FP8:
        acc += tl.dot(x, tl.trans(w.to(DTYPE)), input_precision="ieee") * w_scale[None, :]
    elif X_FP8:
        values = (x.to(tl.float32) * x_scale[:, None]).to(DTYPE)
        acc = tl.dot(values, tl.trans(w), acc, input_precision="ieee")
    else:
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["held"])  # it differs from step to step where one rank is alone
def _grouped_kernel(
    x, x_scales, row_ids, held, counts, offsets, weight, weight_scales, out,
    scale_expert, scale_row, scale_group, x_pitch,
    EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, PADDED: tl.constexpr,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, GATED: tl.constexpr,
    X_FP8: tl.constexpr, W_FP8: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    which = tl.arange(0, EXPERTS_BLOCK)
    tiles = tile_counts(tl.load(counts + which, mask=which < EXPERTS, other=0), M)
    row_tiles = tl.sum(tiles, axis=0)
    channel_blocks: tl.constexpr = (CHANNELS + GROUP - 1) // GROUP
    width_blocks: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    parts: tl.constexpr = 2 if GATED else 1
    for tile in range(tl.program_id(0), row_tiles * tl.cdiv(CHANNELS, N), tl.num_programs(0)):
        expert, local = find_tile(tiles, tile % row_tiles)
        first = expert.to(tl.int64) * PADDED
        if PADDED == 0:
            first = tl.load(offsets + expert)
        row = local * M + tl.arange(0, M)
        mine = row < tl.load(counts + expert)
        slot = first + row
        source, there = slot, mine
        if row_ids is not None:
            source = tl.load(row_ids + slot, mask=mine, other=0)
            there = mine & (source >= 0) & (source < held)
        channel = (tile // row_tiles) * N + tl.arange(0, N)
        real = channel < CHANNELS
        w_row = (expert.to(tl.int64) * (parts * CHANNELS) + channel) * WIDTH
        s_row = (expert * (parts * channel_blocks) + channel // GROUP) * width_blocks
        inner = source if PADDED == 0 else row  # a PADDED view has its scales by column, per expert
        x_scale_at = x_scales
        if X_FP8:
            x_scale_at += expert.to(tl.int64) * scale_expert + inner * scale_row
        acc, gate_acc = tl.zeros((M, N), dtype=tl.float32), tl.zeros((M, N), dtype=tl.float32)
        for k in range(0, WIDTH, K):
            rows = _load(x, source * x_pitch, there, k, WIDTH, K)
            x_scale, gate_scale, scale = 1.0, 1.0, 1.0
            if X_FP8:
                x_scale = tl.load(x_scale_at + (k // GROUP) * scale_group, mask=there, other=0.0)
            if W_FP8:
                scale_at = weight_scales + s_row + k // GROUP
                gate_scale = tl.load(scale_at, mask=real, other=0.0)
                scale = gate_scale
                if GATED:
                    scale = tl.load(scale_at + channel_blocks * width_blocks, mask=real, other=0.0)
            if GATED:
                gate = _load(weight, w_row, real, k, WIDTH, K)
                gate_acc = _product(
                    gate_acc, rows, x_scale, gate, gate_scale, out.dtype.element_ty, X_FP8, W_FP8
                )
                up = _load(weight + CHANNELS * WIDTH, w_row, real, k, WIDTH, K)
                acc = _product(acc, rows, x_scale, up, scale, out.dtype.element_ty, X_FP8, W_FP8)
            else:
                w = _load(weight, w_row, real, k, WIDTH, K)
                acc = _product(acc, rows, x_scale, w, scale, out.dtype.element_ty, X_FP8, W_FP8)
        if GATED:
            acc *= gate_acc / (1.0 + tl.exp(-gate_acc))
        inside = mine[:, None] & real[None, :]
        at = out + slot[:, None] * CHANNELS + channel[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=inside)


def run_experts(
    given: ExpertRows,
    weights: ExpertWeights,
    hidden: torch.Tensor,
    out: torch.Tensor,
    *,
    rows_per_expert: int = 16,
    tiles: tuple[Tiles, Tiles] | None = None,
) -> None:
    """Runs every expert on its rows.

    Args:
        hidden: [given.most, I], room for what lies between the kernels.
        out: [given.most, H], or [E, P, H] for PADDED; row i answers row i. Both are of the weights' dtype, or
          bfloat16 where these are FP8.
        rows_per_expert: expected mean, for which tiles are chosen.
        tiles: of gate/up and of down; None = from the table.
    Raises: InternalError for another shape, dtype or layout.
    """
    experts, width, ffn = weights.down.shape
    weights.check()
    given.check(experts, width)
    dtype = torch.bfloat16 if weights.fp8 else weights.down.dtype
    expect("hidden", hidden, dtype, (given.most, ffn))
    expect("out", out, dtype, (*([experts, given.padded] if given.padded else [given.most]), width))
    if given.scales is None and given.rows.dtype is not dtype:
        raise InternalError(f"rows: {given.rows.dtype}, expected {dtype} or float8 with scales")
    if given.most == 0 or experts == 0:
        return
    up, down = tiles or (
        tiles_for(rows_per_expert, gated=gated, dtype=dtype, fp8=weights.fp8) for gated in (True, False)
    )
    _launch(given, weights.gate_up, weights.gate_up_scale, hidden, up, gated=True)
    inner = ExpertRows(hidden, given.counts, given.offsets)
    _launch(inner, weights.down, weights.down_scale, out, down, gated=False, padded=given.padded)


def _launch(
    given: ExpertRows, weight: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor, tiles: Tiles,
    *, gated: bool, padded: int | None = None,
) -> None:  # fmt: skip
    experts, channels, width = weight.shape
    channels = channels // 2 if gated else channels
    scaled = scale is not None or given.scales is not None
    row_tiles = given.most // tiles.m + min(experts, given.most)
    programs = min(row_tiles * -(-channels // tiles.n), tiles.programs)
    _grouped_kernel[(programs,)](
        given.rows, given.scales, given.row_ids, len(given.rows), given.counts, given.offsets, weight, scale,
        out, *given.scale_strides(), given.rows.stride(-2),
        EXPERTS=experts, EXPERTS_BLOCK=block(experts), PADDED=given.padded if padded is None else padded,
        WIDTH=width, CHANNELS=channels, GATED=gated, X_FP8=given.scales is not None, W_FP8=scale is not None,
        M=tiles.m, N=tiles.n, K=GROUP if scaled else tiles.k, GROUP=GROUP,
        **early(weight), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


_BLOCK = 1024


@triton.jit
def _silu_mul_kernel(gate_up, out, pitch, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    at = gate_up + row * pitch + channel
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + channel, gated.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Gates rows.

    Args:
        gate_up: [T, 2 * I], gate channels first; rows may have a pitch. out: [T, I] of its dtype.
    Raises: InternalError for another shape, dtype or layout.
    """
    rows, width = out.shape
    expect("gate_up", gate_up, FLOATS, (rows, 2 * width), pitch=True)
    expect("out", out, gate_up.dtype, (rows, width))
    size = min(block(width), _BLOCK)
    if out.numel():
        _silu_mul_kernel[(rows, -(-width // size))](
            gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=size, num_warps=4
        )
