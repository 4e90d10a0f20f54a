"""Draws the next token of every row on the device: greedy, or by temperature, top-k, top-p and min-p.

The order is that of model/sampler.py, after the edits of logit_edits.py: temperature, top-k, top-p of what
is left, min-p, draw. Greedy takes the lowest id of the highest logit, exactly. A random row takes its token
from noise of its own seed and position (sampling_weights.py); the distribution is the CPU sampler's, the
tokens are not. A row with NaN or +inf, or nothing finite, gets NO_TOKEN, as does padding made of NaN.

    peak     (row, split)  highest logit of a part of the vocabulary
    cutoff   row           joins the parts; greedy tokens; what the filters remove
    draw     (row, split)  highest key of a part; only for random rows
    pick     row           joins the parts
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ep_server.model.triton.checks import FLOATS, block, expect, expect_range
from ep_server.model.triton.sampling_weights import (
    block_of,
    least_cutoff,
    noise,
    quarter_of,
    scaled,
    total_weight,
)

MAX_SPLITS = 128


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each of N rows is drawn; all on the device.

    temperature: float32, 0 = greedy. top_k: int32, 0 = off. top_p: float32, 1 = off. min_p: float32, 0 = off.
    seed: int64. position: int64, tokens that the request has drawn before.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor

    def check(self, rows: int) -> None:
        """Raises InternalError for another shape, dtype or layout."""
        for name in ("temperature", "top_p", "min_p"):
            expect(name, getattr(self, name), torch.float32, (rows,))
        expect("top_k", self.top_k, torch.int32, (rows,))
        expect("seed", self.seed, torch.int64, (rows,))
        expect("position", self.position, torch.int64, (rows,))


@dataclass(frozen=True, slots=True)
class SamplingSpace:
    """Room for a call. values, ids: [N, splits] float32, int32. highest, cutoff: [N] float32."""

    values: torch.Tensor
    ids: torch.Tensor
    highest: torch.Tensor
    cutoff: torch.Tensor

    @staticmethod
    def of(rows: int, splits: int, device: torch.device) -> SamplingSpace:
        """Any number of splits gives the same tokens."""
        return SamplingSpace(
            torch.empty(rows, splits, dtype=torch.float32, device=device),
            torch.empty(rows, splits, dtype=torch.int32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )

    def check(self, rows: int) -> None:
        """Raises InternalError for another shape, dtype or layout."""
        expect("values", self.values, torch.float32, (rows, None))
        expect_range("splits", self.values.shape[1], 1, MAX_SPLITS)
        expect("ids", self.ids, torch.int32, tuple(self.values.shape))
        expect("highest", self.highest, torch.float32, (rows,))
        expect("cutoff", self.cutoff, torch.float32, (rows,))


@triton.jit
def _keep_better(best, best_id, value, token):
    """Lane by lane the higher value; of equal ones the lower id."""
    better = (value > best) | ((value == best) & (token < best_id))
    return tl.where(better, value, best), tl.where(better, token, best_id)


@triton.jit
def _best(value, token, VOCAB: tl.constexpr):
    """The highest value of a vector and the lowest id that has it."""
    highest = tl.max(value, axis=0)
    return highest, tl.min(tl.where(value == highest, token, VOCAB), axis=0)


@triton.jit
def _join(values, ids, row, splits, VOCAB: tl.constexpr, SPLITS_BLOCK: tl.constexpr):
    split = tl.arange(0, SPLITS_BLOCK)
    value = tl.load(values + row * splits + split, mask=split < splits, other=float("-inf"))
    return _best(value, tl.load(ids + row * splits + split, mask=split < splits, other=VOCAB), VOCAB)


@triton.jit
def _peak_kernel(logits, values, ids, pitch, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    best_id = tl.full((BLOCK,), VOCAB, dtype=tl.int32)
    for start in range(split * BLOCK, VOCAB, splits * BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * pitch + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))  # noqa: PLR0124  NaN is no better than +inf: the row is broken
        best, best_id = _keep_better(best, best_id, x, token)
    value, token = _best(best, best_id, VOCAB)
    tl.store(values + row * splits + split, value)
    tl.store(ids + row * splits + split, token)


@triton.jit(do_not_specialize=["splits"])
def _cutoff_kernel(
    logits, values, ids, highest, cutoffs, tokens, temperatures, top_k, top_p, min_p, pitch, splits,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, SPLITS_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    top, token = _join(values, ids, row, splits, VOCAB, SPLITS_BLOCK)
    fine = (top > float("-inf")) & (top < float("inf"))
    tl.store(highest + row, top)
    tl.store(tokens + row, tl.where(fine, token, -1).to(tl.int64))
    temperature = tl.load(temperatures + row)
    if fine & (temperature > 0):
        line = logits + row * pitch
        cutoff = tl.full((), 0.0, dtype=tl.float32)
        k = tl.load(top_k + row)
        if (k > 0) & (k < VOCAB):
            cutoff = least_cutoff(line, top, temperature, 0.0, k.to(tl.float32), True, VOCAB, BLOCK)
        p = tl.load(top_p + row)
        if p < 1:
            mass = total_weight(line, top, temperature, cutoff, VOCAB, BLOCK) * p
            nucleus = least_cutoff(line, top, temperature, cutoff, mass, False, VOCAB, BLOCK)
            cutoff = tl.maximum(cutoff, nucleus)
        cutoff = tl.minimum(tl.maximum(cutoff, tl.load(min_p + row)), 1.0)  # the likeliest always stays
        tl.store(cutoffs + row, cutoff)


@triton.jit
def _draw_kernel(
    logits, values, ids, highest, cutoffs, tokens, temperatures, seeds, positions, pitch,
    VOCAB: tl.constexpr, QUARTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature = tl.load(temperatures + row)
    if (temperature > 0) & (tl.load(tokens + row) >= 0):
        top, cutoff = tl.load(highest + row), tl.load(cutoffs + row)
        seed, position = tl.load(seeds + row), tl.load(positions + row)
        best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
        best_id = tl.full((BLOCK,), VOCAB, dtype=tl.int32)
        for start in range(split * BLOCK, QUARTER, splits * BLOCK):
            quad = start + tl.arange(0, BLOCK)
            variates = noise(seed, position, quad, QUARTER)
            for part in tl.static_range(4):
                token = quad + part * QUARTER
                real = (quad < QUARTER) & (token < VOCAB)
                x = tl.load(logits + row * pitch + token, mask=real, other=float("-inf"))
                z = scaled(x, top, temperature)
                key = tl.where(tl.exp(z) >= cutoff, z - tl.log(variates[part]), float("-inf"))
                best, best_id = _keep_better(best, best_id, key, token)
        value, token = _best(best, best_id, VOCAB)
        tl.store(values + row * splits + split, value)
        tl.store(ids + row * splits + split, token)


@triton.jit(do_not_specialize=["splits"])
def _pick_kernel(values, ids, tokens, temperatures, splits, VOCAB: tl.constexpr, SPLITS_BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(temperatures + row) > 0) & (tl.load(tokens + row) >= 0):
        _, token = _join(values, ids, row, splits, VOCAB, SPLITS_BLOCK)
        tl.store(tokens + row, token.to(tl.int64))


def sample(
    logits: torch.Tensor,
    rows: SamplingRows,
    space: SamplingSpace,
    tokens: torch.Tensor,
    *,
    random: bool = True,
) -> None:
    """Draws one token per row.

    Args:
        logits: [N, V], rows may have a pitch; not changed. tokens: [N] int64, NO_TOKEN (-1) for a broken row.
        random: False where all rows are greedy: two kernels fewer, the same tokens.
    Raises: InternalError for another shape, dtype or layout.
    """
    expect("logits", logits, FLOATS, (None, None), pitch=True)
    count, vocab = logits.shape
    rows.check(count)
    space.check(count)
    expect("tokens", tokens, torch.int64, (count,))
    if count == 0 or vocab == 0:
        return
    splits, size, pitch = space.values.shape[1], block_of(vocab), logits.stride(0)
    joined = {"VOCAB": vocab, "SPLITS_BLOCK": block(splits)}
    _peak_kernel[(count, splits)](
        logits, space.values, space.ids, pitch, VOCAB=vocab, BLOCK=size, num_warps=4
    )
    _cutoff_kernel[(count,)](
        logits, space.values, space.ids, space.highest, space.cutoff, tokens,
        rows.temperature, rows.top_k, rows.top_p, rows.min_p, pitch, splits,
        BLOCK=size, num_warps=8, **joined,
    )  # fmt: skip
    if random:
        _draw_kernel[(count, splits)](
            logits, space.values, space.ids, space.highest, space.cutoff, tokens,
            rows.temperature, rows.seed, rows.position, pitch,
            VOCAB=vocab, QUARTER=quarter_of(vocab), BLOCK=min(size, 512), num_warps=4,
        )  # fmt: skip
        _pick_kernel[(count,)](
            space.values, space.ids, tokens, rows.temperature, splits, num_warps=1, **joined
        )
