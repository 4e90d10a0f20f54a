"""The device's tables for sampling: what requests ask for, and the scratch space of the kernels.

A request has a slot of the table from its first draw. The kernels read everything from there by the slot of
each row of logits, so a step sends nothing that an earlier step sent. The kernels also update what changes
from token to token: how many were drawn, and which.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.launch import after_previous, block, early, expect, expect_range

TEMPERATURE, TOP_P, MIN_P = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
REPETITION, PRESENCE, FREQUENCY = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
FLOATS = tl.constexpr(8)  # of a row
TOP_K, SEED, DRAWN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
REPORTED, LISTED, WANTS = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
LONGS = tl.constexpr(8)
COUNT_STEP = tl.constexpr(2)  # of a count, for each time a token was drawn
IN_PROMPT = tl.constexpr(1)  # what a count has beside, where the prompt has the token and that counts
ENTRIES = 1152  # of a slot's list
MOST_REPORTED = 32  # alternatives of a token


class Wants(IntFlag):
    """Which kernels a row needs beside those of greedy tokens; of a step, what any of its rows needs.

    DRAW: a random token of the whole row. FILTER: one of what top-k and top-p leave; NUCLEUS: and
    top-k is off. REPORT: log probabilities.
    """

    NOTHING = 0
    PENALTY = 1
    LIST = 2
    MASK = 4
    DRAW = 8
    FILTER = 16
    REPORT = 32
    NUCLEUS = 64


PENALISED, MASKED = tl.constexpr(int(Wants.PENALTY)), tl.constexpr(int(Wants.MASK))
NUCLEUS = tl.constexpr(int(Wants.NUCLEUS))
DRAWS, FILTERS, REPORTS = (
    tl.constexpr(int(Wants.DRAW)),
    tl.constexpr(int(Wants.FILTER)),
    tl.constexpr(int(Wants.REPORT)),
)


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """S slots, V tokens, E entries. Columns of floats and longs: the constants above.

    floats: [S, 8] float32; temperature 0 = greedy, top-p 1, min-p 0, penalties 1, 0, 0 = off.
    longs: [S, 8] int64; top-k 0 = off; seed; tokens drawn; alternatives to report, -1 = none; entries; Wants.
    counts: [S, V] int32; of slots with penalties: twice the times a token was drawn, plus 1 if it is in the
      prompt and the prompt counts (with a repetition penalty).
    tokens, values, until: [S, E] int32, float32, int32; distinct tokens of a slot, what is added to their
      logits, and how many must have been drawn before they can be.
    masks: [S, ceil(V / 32)] int32; bit t % 32 of word t / 32 allows token t.
    """

    floats: torch.Tensor
    longs: torch.Tensor
    counts: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor
    until: torch.Tensor
    masks: torch.Tensor

    @staticmethod
    def of(slots: int, vocab: int, device: torch.device) -> SamplingTable:
        """Slots of nobody: greedy, no edits."""

        def made(width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(slots, width, dtype=dtype, device=device)

        int32, float32 = torch.int32, torch.float32
        return SamplingTable(
            made(FLOATS.value, float32),
            made(LONGS.value, torch.int64),
            made(vocab, int32),
            made(ENTRIES, int32),
            made(ENTRIES, float32),
            made(ENTRIES, int32),
            made(-(-vocab // 32), int32),
        )

    def check(self, vocab: int) -> None:
        """Raises InternalError for another vocabulary."""
        expect("counts", self.counts, torch.int32, (None, vocab))


RECORD = 32  # words of an entry: its slot, a row of floats, a row of longs, then anything


@triton.jit
def _write_slots_kernel(records, floats, longs, RECORD: tl.constexpr, EARLY: tl.constexpr):
    at = tl.arange(0, RECORD)
    record = records + tl.program_id(0) * RECORD
    word, slot = tl.load(record + at), tl.load(record).to(tl.int64)
    after_previous(EARLY)
    last: tl.constexpr = 1 + FLOATS
    tl.store(floats + slot * FLOATS + at - 1, word, mask=(at >= 1) & (at < last))
    tl.store(longs + slot * LONGS * 2 + at - last, word, mask=(at >= last) & (at < last + LONGS * 2))


def write_slots(records: torch.Tensor, table: SamplingTable) -> None:
    """Fills the rows of distinct slots.

    Args:
        records: [N, RECORD] int32, on the host, pinned; floats and longs by their bits, low words first. Not
          changed by the host until the stream has passed this.
    Raises: InternalError for another shape, dtype or layout.
    """
    expect("records", records, torch.int32, (None, RECORD))
    expect("floats", table.floats, torch.float32, (None, FLOATS.value))
    expect("longs", table.longs, torch.int64, (len(table.floats), LONGS.value))
    if len(records):
        floats, longs = table.floats.view(torch.int32), table.longs.view(torch.int32)
        _write_slots_kernel[(len(records),)](
            records, floats, longs, RECORD=RECORD, **early(floats), num_warps=1
        )


MAX_SPLITS = 128
_SPLITS = 16
_CANDIDATES = 2048
_GROUPS = 128
LEADERS = tl.constexpr(8)  # highest keys of a row that are tried
LOWEST = tl.constexpr(-3.4028234663852886e38)  # a threshold that every finite logit reaches


@dataclass(frozen=True, slots=True)
class SamplingSpace:
    """For N rows or fewer, cut into splits.

    values, ids: [N, splits] float32, int32; the best of a split. peaks: [N, splits, groups] float32.
    highest, threshold, cutoff: [N] float32; cutoff is written for rows with top-k or top-p only.
    counts: [N] int32; candidates, perhaps more than there is room for.
    listed, listed_ids: [N, most] float32, int32; candidates in any order: all logits >= threshold.
    masses, ones: [N, splits] int64; sums of weights at the row's temperature, and at temperature 1.
    open_rows: [N] int32; 1 where candidates are not enough. For these (sampling.py):
    keys, key_ids, above: [N, splits, LEADERS] float32, int32, int64. rest: [N, splits] float32.
    """

    values: torch.Tensor
    ids: torch.Tensor
    peaks: torch.Tensor
    highest: torch.Tensor
    threshold: torch.Tensor
    cutoff: torch.Tensor
    counts: torch.Tensor
    listed: torch.Tensor
    listed_ids: torch.Tensor
    masses: torch.Tensor
    ones: torch.Tensor
    open_rows: torch.Tensor
    keys: torch.Tensor
    key_ids: torch.Tensor
    rest: torch.Tensor
    above: torch.Tensor

    @staticmethod
    def of(rows: int, vocab: int, splits: int, device: torch.device) -> SamplingSpace:
        """Any number of splits gives the same tokens."""

        def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(rows, *shape, dtype=dtype, device=device)

        int32, int64 = torch.int32, torch.int64
        leaders = LEADERS.value
        groups, most = min(_GROUPS, block_of(vocab)), min(_CANDIDATES, block(vocab))
        return SamplingSpace(
            made(splits), made(splits, dtype=int32), made(splits, groups),
            made(), made(), made(), made(dtype=int32), made(most), made(most, dtype=int32),
            made(splits, dtype=int64), made(splits, dtype=int64),
            made(dtype=int32), made(splits, leaders), made(splits, leaders, dtype=int32), made(splits),
            made(splits, leaders, dtype=int64),
        )  # fmt: skip

    @property
    def splits(self) -> int:
        """Programs that share a row."""
        return self.values.shape[1]

    @property
    def most(self) -> int:
        """Candidates that there is room for."""
        return self.listed.shape[1]

    def check(self, rows: int, vocab: int) -> None:
        """Raises InternalError for more rows, another vocabulary, or too many splits."""
        expect_range("splits", self.splits, 1, MAX_SPLITS)
        expect_range("rows", rows, 0, len(self.values))
        expect("listed", self.listed, torch.float32, (None, min(_CANDIDATES, block(vocab))))


def splits_of(vocab: int) -> int:
    """Programs for a row of that many tokens, each with a tile or more."""
    return max(min(_SPLITS, -(-vocab // block_of(vocab))), 1)


def quarter_of(vocab: int) -> int:
    """Token ids that share a Philox counter are this far apart; a function of the vocabulary alone."""
    return -(-vocab // 4)


def block_of(vocab: int) -> int:
    """Token ids of a tile."""
    return min(block(quarter_of(vocab)), 1024)
