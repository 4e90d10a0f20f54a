"""[7] From rows to expert ids and weights in one kernel: product and choice (router_choice).

Programs: (tile of tokens, part of the input channels). Each leaves its part of the product in scratch and
takes a ticket of its tile; the one that takes the last ticket sums the parts in their order, whoever made
them when, and chooses. So a token's logits have the same bits whatever the other rows are. It also puts the
tickets back to 0, for the next call on the same stream: a captured call can be replayed.

For rows of decode steps: a product of many rows is faster by the library, followed by router.route.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ep_server.model.triton.checks import FLOATS, block, expect, expect_range
from ep_server.model.triton.early import after_previous, early
from ep_server.model.triton.router_choice import Choice, choose, lanes_of, live_of, store_choice

MOST_ROWS, MOST_EXPERTS = 512, 256  # with which this kernel is used
_TOKENS, _LEAST_CHANNELS = 16, 128


@dataclass(frozen=True, slots=True)
class RouterSpace:
    """Scratch of calls that run one after the other; its contents between them are not read.

    parts: [tiles, parts, tokens of a tile, E padded] float32.
    tickets: [tiles] int32, zeros before the first call and after each.
    """

    parts: torch.Tensor
    tickets: torch.Tensor

    @staticmethod
    def of(
        rows: int, weight: torch.Tensor, *, tokens: int = _TOKENS, parts: int | None = None
    ) -> RouterSpace:
        """For so many rows and a router's weight [E, H].

        Args:
            tokens: of a tile, a power of two from 16 on. parts: that the channels are cut into.
        """
        experts, width = weight.shape
        parts = parts or parts_for(width)
        tiles = -(-rows // tokens)
        return RouterSpace(
            torch.empty(tiles, parts, tokens, block(experts, 16), device=weight.device),
            torch.zeros(tiles, dtype=torch.int32, device=weight.device),
        )


@dataclass(frozen=True, slots=True)
class RouterTile:
    """channels: read at a time. experts: all of them."""

    channels: int
    warps: int
    stages: int


@triton.jit
def _load(base, row_at, row_ok, channel, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """[rows, channels], zeros outside. EVEN: no channel is."""
    at = base + row_at[:, None] + channel[None, :]
    inside = row_ok[:, None]
    if not EVEN:
        inside = inside & (channel < WIDTH)[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["layer", "seed", "rows"])
def _route_rows_kernel(
    x, weight, parts, tickets, bias, num_tokens, numbers, positions, ids, weights,
    rows, pitch, eps, scale, seed, layer,
    EXPERTS: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr, TOP2: tl.constexpr, RENORMALISE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr, STEPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    tile, part = tl.program_id(0), tl.program_id(1)
    member, column = tl.arange(0, TOKENS), tl.arange(0, EXPERT_BLOCK)
    token = tile * TOKENS + member
    live = live_of(num_tokens, rows)
    if tile * TOKENS >= live:  # no program of this tile takes a ticket
        if part == 0:
            nothing = tl.zeros((TOKENS, K_BLOCK), dtype=tl.float32)
            store_choice(ids, weights, token, rows, live, nothing, nothing, K, K_BLOCK)
        return
    acc = tl.zeros((TOKENS, EXPERT_BLOCK), dtype=tl.float32)
    even: tl.constexpr = WIDTH == PARTS * STEPS * CHANNELS
    for step in range(STEPS):
        channel = (part * STEPS + step) * CHANNELS + tl.arange(0, CHANNELS)
        given = _load(x, token.to(tl.int64) * pitch, token < live, channel, WIDTH, even)
        w = _load(weight, column * WIDTH, column < EXPERTS, channel, WIDTH, even)
        acc = tl.dot(given.to(w.dtype), tl.trans(w), acc, input_precision="ieee")
    size: tl.constexpr = TOKENS * EXPERT_BLOCK
    first = parts + tile * (PARTS * size)
    tl.store(first + part * size + member[:, None] * EXPERT_BLOCK + column[None, :], acc)
    tl.debug_barrier()  # all threads' stores come before the ticket
    if tl.atomic_add(tickets + tile, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
        tl.store(tickets + tile, 0)
        expert, real = lanes_of(EXPERTS, GROUPS, GROUP_BLOCK, SIZE_BLOCK)
        at = first + member[:, None] * EXPERT_BLOCK + expert[None, :]
        logits = tl.where(real, 0.0, float("-inf"))[None, :] + tl.zeros((TOKENS, 1), dtype=tl.float32)
        for one in tl.static_range(PARTS):  # .cg: from L2, where the other programs' stores are
            logits += tl.load(at + one * size, mask=real[None, :], other=0.0, cache_modifier=".cg")
        chosen, gates = choose(
            logits, bias, numbers, positions, token, live, eps, scale, seed, layer,
            EXPERTS, K, GROUPS, TOP_GROUPS, SIGMOID, TOP2, RENORMALISE, GROUP_BLOCK, SIZE_BLOCK, K_BLOCK,
            TOKENS,
        )  # fmt: skip
        store_choice(ids, weights, token, rows, live, chosen, gates, K, K_BLOCK)


def route_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    choice: Choice,
    space: RouterSpace,
    tile: RouterTile | None = None,
) -> None:
    """Chooses experts. Products of weight's dtype are summed in float32.

    Args:
        x: [T, H], rows may have a pitch. weight: [E, H] of x's dtype, or float32; E is at most MOST_EXPERTS.
        space: of at least T rows and this weight's shape. tile: instead of tile_for().
    Raises: InternalError for another shape, dtype or layout.
    """
    rows, (experts, width) = len(x), weight.shape
    tiles, parts, tokens, columns = space.parts.shape
    expect_range("num_experts", choice.spec.num_experts, 1, MOST_EXPERTS)
    choice.check(rows)
    expect("weight", weight, (torch.float32, x.dtype), (choice.spec.num_experts, None))
    expect("x", x, FLOATS, (None, width), pitch=True)
    expect_range("rows", rows, 0, tiles * tokens)
    expect("parts", space.parts, torch.float32, (None, None, None, block(experts, 16)))
    expect("tickets", space.tickets, torch.int32, (tiles,))
    tile = tile or tile_for(columns, weight.dtype)
    if rows:
        _route_rows_kernel[(-(-rows // tokens), parts)](
            x=x, weight=weight, parts=space.parts, tickets=space.tickets, rows=rows, pitch=x.stride(0),
            **choice.arguments(), WIDTH=width, TOKENS=tokens, PARTS=parts, EXPERT_BLOCK=columns,
            CHANNELS=tile.channels, STEPS=-(-width // (parts * tile.channels)), **early(x),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def tile_for(columns: int, dtype: torch.dtype) -> RouterTile:
    """By the padded number of experts and the weight's dtype: a guess from shapes."""
    warps = 4 if columns <= 128 else 8
    if dtype is torch.float32:
        return RouterTile(max(16, min(32, 4096 // columns)), warps, 2)
    return RouterTile(max(32, min(128, 8192 // columns)), warps, 5)


def parts_for(width: int) -> int:
    """Of H channels. A program reads E * H / parts weights, the last one 16 * E * parts sums.

    The sum of both, in bytes of bfloat16 and float32, is least at sqrt(H / 32) parts.
    """
    return min(8 if width <= 4096 else 16, -(-width // _LEAST_CHANNELS))


def fits(rows: int, experts: int) -> bool:
    """Whether this kernel is used for so many rows."""
    return 0 < rows <= MOST_ROWS and experts <= MOST_EXPERTS
