"""The sums of the demo: what is asked, what is right, what training never sees."""

from __future__ import annotations

import pytest

from ep_server.cli.demo.sums import (
    HELD_OUT_SHARE,
    LIMIT,
    OPERATORS,
    Sum,
    draw_held_out,
    is_held_out,
    parse_answer,
)


def test_answers_are_pythons() -> None:
    assert Sum(347, "+", 582).answer == 929
    assert Sum(7, "-", 12).answer == -5
    assert Sum(7, "-", 12).prompt == "7 - 12 ="


def test_drawn_sums_are_held_out_different_and_repeatable() -> None:
    drawn = draw_held_out(seed=5, count=400)
    assert len(set(drawn)) == 400
    assert all(is_held_out(each.a, each.op, each.b) for each in drawn)
    assert all(0 <= n < LIMIT for each in drawn for n in (each.a, each.b))
    assert {each.op for each in drawn} == set(OPERATORS)
    assert drawn == draw_held_out(seed=5, count=400)
    assert drawn[:20] == draw_held_out(seed=5, count=20)
    assert drawn != draw_held_out(seed=6, count=400)


def test_a_pair_is_held_out_together_with_its_mirror() -> None:
    for a in range(0, LIMIT, 7):
        for b in range(0, LIMIT, 31):
            assert is_held_out(a, "+", b) == is_held_out(b, "+", a)
            assert is_held_out(a, "-", b) == is_held_out(b, "-", a)


def test_the_rule_never_changes() -> None:
    """The committed model was trained without exactly these."""
    first = [(a, op, b) for a in range(12) for op in OPERATORS for b in range(12) if is_held_out(a, op, b)]
    assert first == PINNED


def test_the_share_is_as_stated() -> None:
    pairs = [(a, b) for a in range(0, LIMIT, 3) for b in range(a, LIMIT, 3)]
    held = sum(is_held_out(a, "+", b) for a, b in pairs)
    assert held / len(pairs) == pytest.approx(1 / HELD_OUT_SHARE, rel=0.05)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (" 929", 929),
        ("1998", 1998),
        ("  -5", -5),
        ("   0", 0),
        ("", None),
        ("-", None),
        ("12-3", None),
        ("٣", None),
    ],
)
def test_only_a_plain_number_is_an_answer(text: str, number: int | None) -> None:
    assert parse_answer(text) == number


PINNED: list[tuple[int, str, int]] = [
    (0, "+", 1),
    (0, "-", 9),
    (1, "+", 0),
    (1, "+", 7),
    (2, "-", 2),
    (3, "+", 3),
    (4, "+", 7),
    (4, "-", 7),
    (4, "-", 9),
    (5, "+", 8),
    (5, "-", 7),
    (5, "-", 9),
    (5, "-", 11),
    (6, "+", 6),
    (7, "+", 1),
    (7, "+", 4),
    (7, "-", 4),
    (7, "-", 5),
    (7, "-", 8),
    (8, "+", 5),
    (8, "-", 7),
    (8, "-", 8),
    (9, "-", 0),
    (9, "-", 4),
    (9, "-", 5),
    (11, "-", 5),
]
