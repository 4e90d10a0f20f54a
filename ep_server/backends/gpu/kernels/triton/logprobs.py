"""Log probabilities of drawn and of the likeliest tokens: at temperature 1, after edits, before filters.

The likeliest are picked one by one from the candidates of sampling.py: the highest logit first, the lowest id
among equals. If there are too many candidates to store, or too few, the kernel scans the whole row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.launch import FLOATS as FLOAT_TYPES
from ep_server.backends.gpu.kernels.triton.launch import block, expect
from ep_server.backends.gpu.kernels.triton.sampling_filters import ONE, best_of, keep_better, nothing
from ep_server.backends.gpu.kernels.triton.sampling_table import (
    LONGS,
    REPORTED,
    REPORTS,
    WANTS,
    SamplingSpace,
    SamplingTable,
    block_of,
)


@dataclass(frozen=True, slots=True)
class SamplingReport:
    """chosen: [N] float32. top: [N, M] float32, ids: [N, M] int32, best first.

    Only what a row asks for is written.
    """

    chosen: torch.Tensor
    top: torch.Tensor
    ids: torch.Tensor


@triton.jit
def _next_best(
    values, ids, length, value, token, LISTED: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """The best after (value, token)."""
    best, best_id = nothing(BLOCK, VOCAB)
    for start in range(0, length, BLOCK):
        other = start + tl.arange(0, BLOCK)
        real = other < length
        x = tl.load(values + other, mask=real, other=float("-inf")).to(tl.float32)
        if LISTED:
            other = tl.load(ids + other, mask=real, other=VOCAB)
        after = real & ((x < value) | ((x == value) & (other > token)))
        best, best_id = keep_better(
            best, best_id, tl.where(after, x, float("-inf")), tl.where(after, other, VOCAB)
        )
    return best_of(best, best_id, VOCAB)


@triton.jit(do_not_specialize=["splits"])
def _report_kernel(
    logits, slots, longs, highest, counts, listed, listed_ids, ones, tokens, chosen, top, top_ids, pitch,
    splits, VOCAB: tl.constexpr, MOST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    setting = longs + tl.load(slots + row).to(tl.int64) * LONGS
    token = tl.load(tokens + row)
    if ((tl.load(setting + WANTS) & REPORTS) != 0) & (token >= 0):
        split = tl.arange(0, SPLITS_BLOCK)
        total = tl.sum(tl.load(ones + row * splits + split, mask=split < splits, other=0), axis=0)
        base = tl.load(highest + row)
        shift = tl.log(total.to(tl.float32) / ONE)
        tl.store(chosen + row, tl.load(logits + row * pitch + token).to(tl.float32) - base - shift)
        wanted, count = tl.load(setting + REPORTED).to(tl.int32), tl.load(counts + row)
        enough = (count <= MOST) & (count >= wanted)
        value = tl.full((), float("inf"), dtype=tl.float32)
        last = tl.full((), -1, dtype=tl.int32)
        for place in range(0, wanted):
            if enough:
                few, few_ids = listed + row * MOST, listed_ids + row * MOST
                value, last = _next_best(few, few_ids, count, value, last, True, VOCAB, BLOCK)
            else:
                value, last = _next_best(
                    logits + row * pitch, listed_ids, VOCAB, value, last, False, VOCAB, BLOCK
                )
            tl.store(top + row * WIDTH + place, value - base - shift)
            tl.store(top_ids + row * WIDTH + place, last)


def report(
    logits: torch.Tensor,
    slots: torch.Tensor,
    table: SamplingTable,
    space: SamplingSpace,
    tokens: torch.Tensor,
    out: SamplingReport,
) -> None:
    """Fills `out` for the rows that asked, after sample() with the same arguments.

    A row asks for at most M and at most V alternatives. One with NO_TOKEN gets nothing.
    Raises: InternalError for another shape, dtype or layout.
    """
    expect("logits", logits, FLOAT_TYPES, (None, None), pitch=True)
    count, vocab = logits.shape
    expect("slots", slots, torch.int32, (count,))
    expect("tokens", tokens, torch.int64, (count,))
    expect("chosen", out.chosen, torch.float32, (count,))
    expect("top", out.top, torch.float32, (count, None))
    expect("ids", out.ids, torch.int32, tuple(out.top.shape))
    space.check(count, vocab)
    if count == 0 or vocab == 0:
        return
    _report_kernel[(count,)](
        logits, slots, table.longs, space.highest, space.counts, space.listed, space.listed_ids, space.ones,
        tokens, out.chosen, out.top, out.ids, logits.stride(0), space.splits,
        VOCAB=vocab, MOST=space.most, WIDTH=out.top.shape[1], BLOCK=block_of(vocab),
        SPLITS_BLOCK=block(space.splits), num_warps=4,
    )  # fmt: skip
