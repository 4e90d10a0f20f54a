"""[7] [8] Dispatch and combine of a rank without peers: rows stay where they are.

    place_rows        sorts choices by expert: the token that each expert row reads, the row of each choice
    add_outputs_norm  branch = sum over k of gate * output row of choice k, float32, rounded once;
                      then norm.add_rms_norm, in the same kernel

T tokens, K choices, E experts. The rows of an expert are in the order of their tokens. Padded tokens (ids -1)
have no row: their branch is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.launch import (
    FLOATS,
    after_previous,
    block,
    early,
    expect,
    expect_range,
)
from ep_server.backends.gpu.kernels.triton.norm import (
    MAX_DIM,
    load_wide,
    store_normed,
    store_stream,
    warps_for,
)

# Choices read at a time; limits the number of compiled kernels. With more than _MANY, _LARGE.
_LEAST, _CHUNK, _LARGE, _MANY = 256, 2048, 8192, 8192


@dataclass(frozen=True, slots=True)
class Places:
    """The places of choices.

    counts: [E] int32. offsets: [E + 1] int64. tokens: [T * K] int64, the token that each row reads; unused
    rows are not written. rows: [T, K] int32, the row of each choice; not written if its id is -1.
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


@triton.jit
def _before(chosen, expert):
    """1 for choices of earlier experts, else 0."""
    return ((chosen >= 0) & (chosen < expert)).to(tl.int32)


@triton.jit
def _place(chosen, expert, row, at, tokens, rows, K: tl.constexpr):
    """Assigns rows from `row` on to the expert's choices. Returns the row after the last."""
    mine = chosen == expert
    place = row + tl.cumsum(mine.to(tl.int32), axis=0) - 1
    tl.store(tokens + place, (at // K).to(tl.int64), mask=mine)
    tl.store(rows + at, place, mask=mine)
    return row + tl.sum(mine.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["size"])  # it differs from step to step
def _place_kernel(
    ids, counts, offsets, tokens, rows, totals, size,
    EXPERTS: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, ONE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    expert, at = tl.program_id(0), tl.arange(0, CHUNK)
    chosen = tl.load(ids + at, mask=at < size, other=-1)
    earlier = _before(chosen, expert)
    if not ONE:
        for start in range(CHUNK, size, CHUNK):
            earlier += _before(tl.load(ids + start + at, mask=start + at < size, other=-1), expert)
    first = tl.sum(earlier, axis=0)
    row = _place(chosen, expert, first, at, tokens, rows, K)
    if not ONE:
        for start in range(CHUNK, size, CHUNK):
            chosen = tl.load(ids + start + at, mask=start + at < size, other=-1)
            row = _place(chosen, expert, row, start + at, tokens, rows, K)
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
    chunk = _LARGE if choices > _MANY else min(block(choices, _LEAST), _CHUNK)
    _place_kernel[(experts,)](
        ids, places.counts, places.offsets, places.tokens, places.rows, totals, choices,
        EXPERTS=experts, K=max(ids.shape[1], 1), CHUNK=chunk, ONE=choices <= chunk,
        **early(ids, lets_next_start=True), num_warps=16 if chunk == _LARGE else 4,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExpertOutputs:
    """The terms that a sparse block adds to the residual stream, not summed yet.

    rows: [N, H]. ids, places: [T, K], input and output of place_rows. gates: [T, K] float32.
    shared: [T, H] of the stream's dtype, output of shared experts, if there are any.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    gates: torch.Tensor
    places: torch.Tensor
    shared: torch.Tensor | None = None


@triton.jit
def _answers_kernel(
    rows, ids, gates, places, shared, residual, weight, out, eps,
    DIM: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    choice, channel = tl.arange(0, K_BLOCK), tl.arange(0, BLOCK)
    inside, at = channel < DIM, token * DIM + channel
    w = load_wide(weight + channel, inside)
    after_previous(EARLY)
    stream = load_wide(residual + at, inside)
    chosen = token * K + choice
    row = tl.load(places + chosen, mask=choice < K, other=0)  # at once with the id; anything where that is -1
    real = (choice < K) & (tl.load(ids + chosen, mask=choice < K, other=-1) >= 0)
    gate = tl.load(gates + chosen, mask=choice < K, other=0.0)
    answers = rows + row.to(tl.int64)[:, None] * DIM + channel[None, :]
    answer = tl.load(answers, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
    total = tl.sum(answer * tl.where(real, gate, 0.0)[:, None], axis=0)
    # Rounded in the same way as by a combine between ranks.
    branch = total.to(rows.dtype.element_ty).to(residual.dtype.element_ty).to(tl.float32)
    if shared is not None:
        branch += load_wide(shared + at, inside)
        branch = branch.to(residual.dtype.element_ty).to(tl.float32)
    value = store_stream(residual + at, stream + branch, inside)
    store_normed(out + at, value, w, inside, eps, DIM)


def add_outputs_norm(
    answers: ExpertOutputs,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> None:
    """Sums the outputs for each token's choices, adds the sum to the residual stream and norms the result.

    Args:
        residual: [T, H]; becomes the sum. weight: [H]. out: [T, H]. All of one dtype.
    Raises: InternalError for another shape, dtype or layout.
    """
    tokens, dim = residual.shape
    expect_range("dim", dim, 1, MAX_DIM)
    expect("rows", answers.rows, FLOATS, (None, dim))
    expect("ids", answers.ids, torch.int64, (tokens, None))
    expect("gates", answers.gates, torch.float32, tuple(answers.ids.shape))
    expect("places", answers.places, torch.int32, tuple(answers.ids.shape))
    expect("residual", residual, FLOATS, (tokens, dim))
    if answers.shared is not None:
        expect("shared", answers.shared, residual.dtype, (tokens, dim))
    expect("weight", weight, residual.dtype, (dim,))
    expect("out", out, residual.dtype, (tokens, dim))
    if residual.numel():
        size, choices = block(dim), answers.ids.shape[1]
        _answers_kernel[(tokens,)](
            answers.rows, answers.ids, answers.gates, answers.places, answers.shared,
            residual, weight, out, eps,
            DIM=dim, K=choices, K_BLOCK=block(choices), BLOCK=size,
            **early(residual, lets_next_start=True), num_warps=warps_for(size),
        )  # fmt: skip
