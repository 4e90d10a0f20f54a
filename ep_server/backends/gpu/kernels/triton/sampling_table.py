"""What requests ask of sampling, in tables on the device: a row per slot, which a request has while it draws.

Kernels get the slot of every row of logits and read the rest here, so a step sends nothing that an earlier
one sent. What changes from token to token (how many were drawn, and which) is changed by the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

import torch
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.checks import expect

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
