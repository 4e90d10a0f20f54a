"""When messages with a time of sending become visible (network_emulation.hpp), compiled for the CPU."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
UNIT, WRAPS = 1024, 1024 << 32  # ns: of a time of sending; after how long its 32 bits repeat
MS, HOUR = 1_000_000, 3_600_000_000_000

Message = tuple[int, int]  # sent, arrived: ns
Visible = list[tuple[int, int]]  # number of the message, when; in this order


@pytest.fixture(scope="module")
def visible(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Visible]:
    made = tmp_path_factory.mktemp("line") / "delay_line"
    line = ["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-Icsrc"]
    source = "tests/support/fabric/delay_line.cpp"
    subprocess.run([*line, source, "-o", str(made)], cwd=ROOT, check=True, timeout=120)

    def run(delay: int, *messages: Message) -> Visible:
        given = " ".join(map(str, (delay, *(number for message in messages for number in message))))
        said = subprocess.run([made], input=given, text=True, capture_output=True, check=True, timeout=10)
        return [(int(number), int(when)) for number, when in map(str.split, said.stdout.splitlines())]

    return run


def expected(delay: int, sent: int, arrived: int) -> int:
    """By clocks that never wrap: D after the sending, in units, but never before the arrival."""
    return max(-(-sent // UNIT) * UNIT + delay, arrived)


@pytest.mark.parametrize("begin", [1, UNIT // 2 + 7, 123 * HOUR + 1, WRAPS - 2 * MS, 5 * WRAPS - MS // 2])
@pytest.mark.parametrize("transit", [0, 1, UNIT, MS // 2, MS - 1, MS, MS + 1, 5 * MS, 1000 * MS, HOUR // 3])
def test_a_delay_counts_from_the_sending(visible: Callable[..., Visible], begin: int, transit: int) -> None:
    ((_, when),) = visible(MS, (begin, begin + transit))
    assert when >= begin + MS
    # A message cannot be rounded into the future: then it is held from its arrival.
    assert when == min(expected(MS, begin, begin + transit), begin + transit + MS)


def test_a_late_look_sees_everything_at_once(visible: Callable[..., Visible]) -> None:
    late = [(HOUR + n * MS, HOUR + 50 * MS) for n in range(10)]
    assert visible(5 * MS, *late) == [(n, HOUR + 50 * MS) for n in range(10)]


@pytest.mark.parametrize("ahead", [2 * UNIT, MS, HOUR // 2, HOUR, WRAPS, 3 * WRAPS + HOUR])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_wait_is_bounded_whatever_the_clocks_say(
    visible: Callable[..., Visible], ahead: int, sign: int
) -> None:
    arrived = 100 * HOUR
    ((_, when),) = visible(MS, (arrived + sign * ahead, arrived))
    assert arrived <= when <= arrived + MS


def test_a_sender_stays_in_order(visible: Callable[..., Visible]) -> None:
    same = [(HOUR, HOUR + n) for n in range(0, 40, 4)]
    assert [number for number, _ in visible(MS, *same)] == list(range(10))
    ahead = [(2 * HOUR + n, HOUR + n) for n in range(0, 40, 4)]  # of the clocks that differ, too
    assert [number for number, _ in visible(MS, *ahead)] == list(range(10))


def test_a_late_sender_holds_nobody_up(visible: Callable[..., Visible]) -> None:
    """Found in one look: what was sent first becomes visible first."""
    begin = 1000 * HOUR // UNIT * UNIT
    sent = [begin + 800 * UNIT, begin, begin + 400 * UNIT]
    seen = visible(MS, *((at, begin + 900 * UNIT) for at in sent))
    assert seen == [(number, sent[number] + MS) for number in (1, 2, 0)]


def test_a_delay_of_zero_holds_nothing(visible: Callable[..., Visible]) -> None:
    assert visible(0, (HOUR, HOUR + 5), (2 * HOUR, HOUR + 6)) == [(0, HOUR + 5), (1, HOUR + 6)]
