"""Tables, space and noise for the tests of sampling kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.sampling import sample
from ep_server.backends.gpu.kernels.triton.sampling_filters import noise, scaled
from ep_server.backends.gpu.kernels.triton.sampling_table import (
    SamplingSpace,
    SamplingTable,
    Wants,
    quarter_of,
)
from tests.support.triton.harness import DEVICE, NAN

ALL = Wants.DRAW | Wants.FILTER | Wants.NUCLEUS


def table_of(
    count: int,
    vocab: int,
    temperature: float | Sequence[float] = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: Sequence[int] | None = None,
    position: int = 0,
    reported: int = -1,
) -> SamplingTable:
    """Row r of the logits has slot count - 1 - r (slots_of); behind them is a slot of NaN."""
    table = SamplingTable.of(count + 1, vocab, DEVICE)
    table.floats[-1] = NAN
    for column, value in enumerate((1.0, top_p, min_p, 1.0)):
        table.floats[:count, column] = value
    table.floats[:count, 0] = torch.as_tensor(temperature).to(DEVICE).expand(count).flip(0)
    table.longs[:, 0], table.longs[:, 2], table.longs[:, 3] = top_k, position, reported
    table.longs[:count, 1] = torch.tensor(seeds or range(count), device=DEVICE).flip(0)
    limited = 0 < top_k < vocab
    drawn = Wants.FILTER if limited else Wants.FILTER | Wants.NUCLEUS if top_p < 1 else Wants.DRAW
    table.longs[:count, 5] = (table.floats[:count, 0] > 0).long() * int(drawn)
    if reported >= 0:
        table.longs[:count, 5] |= int(Wants.REPORT)
    return table


def slots_of(count: int) -> torch.Tensor:
    return torch.arange(count - 1, -1, -1, dtype=torch.int32, device=DEVICE)


def space_of(rows: int, vocab: int, splits: int) -> SamplingSpace:
    """Full of NaN, and of numbers that nothing may take for its own."""
    space = SamplingSpace.of(rows, vocab, splits, DEVICE)
    for name in SamplingSpace.__slots__:
        part = getattr(space, name)
        part.fill_(NAN if part.dtype.is_floating_point else -7)
    return space


def draw(
    logits: torch.Tensor, table: SamplingTable, splits: int = 2, wants: Wants = ALL
) -> tuple[list[int], SamplingSpace]:
    count, vocab = logits.shape
    space = space_of(count, vocab, splits)
    tokens = torch.full((count,), -9, device=DEVICE)
    sample(logits, slots_of(count), table, space, tokens, wants)
    return tokens.tolist(), space


def searching(table: SamplingTable) -> SamplingTable:
    """The same with no race."""
    longs = table.longs.clone()
    longs[:, 5] &= ~int(Wants.NUCLEUS)
    return replace(table, longs=longs)


@triton.jit
def _inspect_kernel(
    logits, weights, keys, highest, temperature, seed, position, VOCAB: tl.constexpr, QUARTER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The weights and keys of a row of logits, one tile for each quarter of the vocabulary."""
    quad = tl.arange(0, BLOCK)
    variates = noise(tl.load(seed), tl.load(position), quad, QUARTER)
    for part in tl.static_range(4):
        token = quad + part * QUARTER
        real = (quad < QUARTER) & (token < VOCAB)
        z = scaled(tl.load(logits + token, mask=real, other=0.0), tl.load(highest), tl.load(temperature))
        tl.store(weights + token, tl.exp(z), mask=real)
        tl.store(keys + token, z - tl.log(variates[part]), mask=real)


def weights_and_keys(
    logits: torch.Tensor, table: SamplingTable, row: int
) -> tuple[torch.Tensor, torch.Tensor]:
    count, vocab = logits.shape
    weights, keys = (torch.empty(vocab, device=DEVICE) for _ in range(2))
    top = logits[row].float().max().reshape(1)
    slot = count - 1 - row
    _inspect_kernel[(1,)](
        logits[row].contiguous(), weights, keys, top,
        table.floats[slot, :1], table.longs[slot, 1:2], table.longs[slot, 2:3],
        VOCAB=vocab, QUARTER=quarter_of(vocab), BLOCK=triton.next_power_of_2(quarter_of(vocab)),
    )  # fmt: skip
    return weights, keys
