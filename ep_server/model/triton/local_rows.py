"""Dispatch and combine of a rank that has no peers: the rows stay where they are.

    place_rows   sorts choices by expert: which token each row of an expert reads, and which row answers it
    sum_rows     out[t] = sum over k of weight * row that answers choice k, float32, rounded once

T tokens, K choices, E experts. Rows of an expert are in the order of their tokens. Padded tokens (ids -1)
have no row and get zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ep_server.model.triton.checks import FLOATS, block, expect
from ep_server.model.triton.early import after_previous, early

_LEAST, _CHUNK, _CHANNELS = 256, 2048, 1024  # choices read at a time: few forms of a kernel


@dataclass(frozen=True, slots=True)
class Places:
    """Where choices went.

    counts: [E] int32. offsets: [E + 1] int64. tokens: [T * K] int64, by row, the token it reads; rows that no
    choice has are not written. rows: [T, K] int32, by choice, its row; not written where its id is -1.
    """

    counts: torch.Tensor
    offsets: torch.Tensor
    tokens: torch.Tensor
    rows: torch.Tensor

    @staticmethod
    def empty(ids: torch.Tensor, experts: int) -> Places:
        """Room for the choices ids: [T, K]."""
        device = ids.device
        return Places(
            torch.empty(experts, dtype=torch.int32, device=device),
            torch.empty(experts + 1, dtype=torch.int64, device=device),
            torch.empty(ids.numel(), dtype=torch.int64, device=device),
            torch.empty(ids.shape, dtype=torch.int32, device=device),
        )


@triton.jit(do_not_specialize=["size"])  # it differs from step to step
def _place_kernel(
    ids, counts, offsets, tokens, rows, totals, size,
    EXPERTS: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    expert = tl.program_id(0)
    first = tl.zeros((), dtype=tl.int32)
    for start in range(0, size, CHUNK):
        at = start + tl.arange(0, CHUNK)
        chosen = tl.load(ids + at, mask=at < size, other=-1)
        first += tl.sum(((chosen >= 0) & (chosen < expert)).to(tl.int32), axis=0)
    row = first
    for start in range(0, size, CHUNK):
        at = start + tl.arange(0, CHUNK)
        mine = tl.load(ids + at, mask=at < size, other=-1) == expert
        place = row + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(tokens + place, (at // K).to(tl.int64), mask=mine)
        tl.store(rows + at, place, mask=mine)
        row += tl.sum(mine.to(tl.int32), axis=0)
    tl.store(counts + expert, row - first)
    tl.store(offsets + expert, first.to(tl.int64))
    tl.store(totals + expert, tl.load(totals + expert) + row - first)
    if expert == EXPERTS - 1:
        tl.store(offsets + EXPERTS, row.to(tl.int64))


def place_rows(ids: torch.Tensor, places: Places, totals: torch.Tensor) -> None:
    """Sorts choices by expert.

    Args:
        ids: [T, K] int64, -1 or 0 to E - 1. places: is filled. totals: [E] int32, += counts.
    Raises: InternalError for another shape, dtype or layout.
    """
    experts, choices = len(places.counts), ids.numel()
    expect("ids", ids, torch.int64, (None, None))
    expect("counts", places.counts, torch.int32, (experts,))
    expect("offsets", places.offsets, torch.int64, (experts + 1,))
    expect("tokens", places.tokens, torch.int64, (choices,))
    expect("rows", places.rows, torch.int32, tuple(ids.shape))
    expect("totals", totals, torch.int32, (experts,))
    _place_kernel[(experts,)](
        ids, places.counts, places.offsets, places.tokens, places.rows, totals, choices,
        EXPERTS=experts, K=max(ids.shape[1], 1), CHUNK=min(block(choices, _LEAST), _CHUNK), **early(ids),
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _sum_kernel(
    answers, ids, weights, rows, out,
    WIDTH: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    choice, channel = tl.arange(0, K_BLOCK), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = token * K + choice
    real = (choice < K) & (tl.load(ids + at, mask=choice < K, other=-1) >= 0)
    row = tl.load(rows + at, mask=real, other=0).to(tl.int64)
    weight = tl.load(weights + at, mask=real, other=0.0)
    inside = real[:, None] & (channel < WIDTH)[None, :]
    answer = tl.load(answers + row[:, None] * WIDTH + channel[None, :], mask=inside, other=0.0)
    total = tl.sum(answer.to(tl.float32) * weight[:, None], axis=0)
    tl.store(out + token * WIDTH + channel, total.to(out.dtype.element_ty), mask=channel < WIDTH)


def sum_rows(
    answers: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor, out: torch.Tensor
) -> None:
    """The weighted sum of what answers each token's choices.

    Args:
        answers: [N, H]. ids, rows: [T, K], as place_rows had and left them. weights: [T, K] float32.
        out: [T, H] of answers' dtype.
    Raises: InternalError for another shape, dtype or layout.
    """
    tokens, width = out.shape
    expect("answers", answers, FLOATS, (None, width))
    expect("ids", ids, torch.int64, (tokens, None))
    expect("weights", weights, torch.float32, tuple(ids.shape))
    expect("rows", rows, torch.int32, tuple(ids.shape))
    expect("out", out, answers.dtype, (tokens, width))
    if out.numel():
        size = min(block(width), _CHANNELS)
        _sum_kernel[(tokens, -(-width // size))](
            answers, ids, weights, rows, out,
            WIDTH=width, K=ids.shape[1], K_BLOCK=block(ids.shape[1]), BLOCK=size, **early(ids), num_warps=4,
        )  # fmt: skip
