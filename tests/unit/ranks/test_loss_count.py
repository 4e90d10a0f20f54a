"""A rank that is lost again and again within ten minutes had better stay out."""

from __future__ import annotations

import pytest

from ep_server.ranks.signs import LOSS_SECONDS, LossCount


@pytest.mark.parametrize(
    ("most", "expected"), [(0, [False] * 4), (1, [True] * 4), (2, [False, True, False, True])]
)
def test_losses_within_ten_minutes_count(most: int, expected: list[bool]) -> None:
    times = [0.0, LOSS_SECONDS - 1, 3 * LOSS_SECONDS, 3 * LOSS_SECONDS + 1]
    now = iter(times)
    losses, others = LossCount(most, lambda: next(now)), LossCount(most)
    assert [bool(losses.too_often(3)) for _ in times] == expected
    assert [bool(others.too_often(rank)) for rank in range(3)] == [most == 1] * 3
