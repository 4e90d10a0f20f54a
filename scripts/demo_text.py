"""The text that the demo model learns from: its tokenizer, whole sums as token ids, batches of training sums.

The tokenizer drops spaces and pads operands with zeros to three digits ("7 + 12 =" reads as 007+012=), so
that digits of equal weight stand at equal distances; the answer is right-aligned to four characters ("  19"),
its most significant digit first. No pair that `ep_server.cli.demo.sums.is_held_out` keeps out is ever drawn.
"""

from __future__ import annotations

import numpy as np
import tokenizers
import torch
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from ep_server.cli.demo.sums import LIMIT, OPERATORS, is_held_out

VOCABULARY = [*"0123456789", "+", "-", "=", " ", "<eos>", "<unk>"]  # the id of a digit is the digit
SPACE, EOS = VOCABULARY.index(" "), VOCABULARY.index("<eos>")
OPERAND_DIGITS, ANSWER_WIDTH = 3, 4
PROMPT_TOKENS = 2 * OPERAND_DIGITS + 2


def make_tokenizer() -> tokenizers.Tokenizer:
    """One token per character; operands padded with zeros, spaces dropped."""
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({text: number for number, text in enumerate(VOCABULARY)}, unk_token="<unk>")
    )
    tokenizer.add_special_tokens(["<eos>", "<unk>"])
    alone, pair = (rf"(?<![0-9])(?=[0-9]{{{digits}}}(?![0-9]))" for digits in (1, 2))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(Regex(r"\s+"), ""),
            normalizers.Replace(Regex(alone), "00"),
            normalizers.Replace(Regex(pair), "0"),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def held_out_table() -> np.ndarray:
    """[operator, a, b] bool of every pair."""
    table = np.zeros((len(OPERATORS), LIMIT, LIMIT), dtype=bool)
    for index, op in enumerate(OPERATORS):
        for a in range(LIMIT):
            for b in range(a, LIMIT):
                table[index, a, b] = table[index, b, a] = is_held_out(a, op, b)
    return table


def encode(a: np.ndarray, op: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Token ids [n, PROMPT_TOKENS + ANSWER_WIDTH + 1] of whole sums, EOS last."""
    answer = np.where(op == 0, a + b, a - b)
    size = np.abs(answer)
    columns = [
        *_digits(a, OPERAND_DIGITS),
        VOCABULARY.index("+") + op,
        *_digits(b, OPERAND_DIGITS),
        np.full_like(a, VOCABULARY.index("=")),
    ]
    for place in range(ANSWER_WIDTH - 1, -1, -1):
        blank = (size < 10**place) & (place > 0)
        sign = blank & (answer < 0) & ((size >= 10 ** (place - 1)) | (place == 1))
        columns.append(np.where(sign, VOCABULARY.index("-"), np.where(blank, SPACE, size // 10**place % 10)))
    return np.stack([*columns, np.full_like(a, EOS)], axis=1)


def _digits(numbers: np.ndarray, width: int) -> list[np.ndarray]:
    return [numbers // 10**place % 10 for place in range(width - 1, -1, -1)]


class Batches:
    """Draws training sums: half uniform, half rich in what is rare and hard.

    Hard are long carries and borrows, and results that just pass a round hundred or 0 (697 - 702).
    """

    def __init__(self, seed: int) -> None:
        self._draw = np.random.default_rng(seed)
        self._held_out = held_out_table()

    def next(self, size: int) -> torch.Tensor:
        """[size, tokens] int64, no pair of which is held out."""
        number = 4 * size  # enough after the held-out ones are gone
        a, b, op = (self._draw.integers(0, high, number) for high in (LIMIT, LIMIT, len(OPERATORS)))
        b = np.where(self._chance(0.4, number), self._carrying(a, op), b)
        b = np.where(self._chance(0.2, number), self._near(a, op), b)
        a, b = (
            np.where(self._chance(0.15, number), n // 10 ** self._draw.integers(0, 3, number), n)
            for n in (a, b)
        )
        kept = np.nonzero(~self._held_out[op, a, b])[0][:size]
        return torch.from_numpy(encode(a[kept], op[kept], b[kept]))

    def _carrying(self, a: np.ndarray, op: np.ndarray) -> np.ndarray:
        """Second operands whose digits often add up to 9 with those of a, or equal them for a subtraction."""
        b = np.zeros_like(a)
        for digit in _digits(a, OPERAND_DIGITS):
            hard = np.where(op == 0, 9 - digit, digit)
            b = 10 * b + np.where(self._chance(0.6, len(a)), hard, self._draw.integers(0, 10, len(a)))
        return b

    def _near(self, a: np.ndarray, op: np.ndarray) -> np.ndarray:
        """Second operands that bring the result close to a round hundred, or to 0 where op subtracts."""
        target = np.where(op == 0, 100 * self._draw.integers(1, 20, len(a)) - a, a)
        return np.clip(target + self._draw.integers(-12, 13, len(a)), 0, LIMIT - 1)

    def _chance(self, share: float, number: int) -> np.ndarray:
        return self._draw.random(number) < share
