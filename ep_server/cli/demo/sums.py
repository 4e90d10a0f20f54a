"""Sums for the demo model: questions, answers, and the pairs kept out of training.

Training (`scripts/train_demo_model.py`), `ep-server demo` and the tests share it.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

LIMIT = 1000  # operands are 0 .. LIMIT - 1
OPERATORS = "+-"
HELD_OUT_SHARE = 8  # one pair in this many is kept out of training


@dataclass(frozen=True, slots=True)
class Sum:
    """One question, `a + b` or `a - b`."""

    a: int
    op: str
    b: int

    @property
    def answer(self) -> int:
        """The correct answer."""
        return self.a + self.b if self.op == "+" else self.a - self.b

    @property
    def prompt(self) -> str:
        """The text that the model continues."""
        return f"{self.a} {self.op} {self.b} ="


def is_held_out(a: int, op: str, b: int) -> bool:
    """Whether a pair is kept out of training.

    A fixed hash of the unordered pair decides: if `a + b` is held out, so is `b + a`.
    """
    low, high = sorted((a, b))
    digest = hashlib.blake2b(f"{low}{op}{high}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0


def draw_held_out(seed: int, count: int) -> list[Sum]:
    """Draws `count` different sums that training never saw; the same seed gives the same list."""
    generator = random.Random(seed)
    drawn: dict[Sum, None] = {}
    while len(drawn) < count:
        a, op, b = generator.randrange(LIMIT), generator.choice(OPERATORS), generator.randrange(LIMIT)
        if is_held_out(a, op, b):
            drawn[Sum(a, op, b)] = None
    return list(drawn)


def parse_answer(text: str) -> int | None:
    """The number in the model's output; None if there is none."""
    digits = text.strip()
    return int(digits) if digits.removeprefix("-").isdecimal() and digits.isascii() else None
