"""The launch policy of dispatch and combine (launch_grid.hpp), compiled for the CPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
SEND, RECV, BOTH = 1, 2, 3
SMS = 132
Grid = tuple[int, ...]


@pytest.fixture(scope="module")
def grid_for(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    made = tmp_path_factory.mktemp("grid") / "launch_grid"
    line = ["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-Icsrc"]
    source = "tests/support/exchange/launch_grid.cpp"
    subprocess.run([*line, source, "-o", str(made)], cwd=ROOT, check=True, timeout=120)

    def grid(operation: str, *sizes: int) -> Grid:
        given = " ".join(map(str, (operation, *sizes)))
        said = subprocess.run([made], input=given, text=True, capture_output=True, check=True, timeout=10)
        return tuple(map(int, said.stdout.split()))

    return grid


def dispatch(halves: int, tokens: int, hidden: int = 7168, sms: int = SMS) -> tuple[int | str, ...]:
    return "dispatch", halves, sms, tokens, tokens, 2, 256, 128, hidden


def combine(halves: int, tokens: int, norms: int = 0, sms: int = SMS) -> tuple[int | str, ...]:
    return "combine", halves, sms, tokens, 2, 14336, norms


def test_dispatch_of_128_tokens(grid_for) -> None:  # type: ignore[no-untyped-def]
    # One block for bookkeeping, one for headers, 128 senders, one header reader, 256 receivers.
    assert grid_for(*dispatch(BOTH, 128)) == (1 + 1 + 128 + 1 + 256, 224, 128, 0, 1028)
    assert grid_for(*dispatch(SEND, 128)) == (1 + 1 + 128, 224, 128, 0, 1024)
    assert grid_for(*dispatch(RECV, 128)) == (1 + 1 + 256, 224, 0, 0, 1028)


def test_few_tokens_are_split(grid_for) -> None:  # type: ignore[no-untyped-def]
    assert grid_for(*dispatch(SEND, 64))[2:4] == (128, 1)
    assert grid_for(*dispatch(SEND, 66))[2:4] == (66, 0)
    assert grid_for(*combine(SEND, 4))[2:4] == (1 + 32, 2)
    assert grid_for(*combine(RECV, 33))[4] == 2
    assert grid_for(*combine(RECV, 34))[4] == 1


def test_a_grid_never_exceeds_what_is_resident(grid_for) -> None:  # type: ignore[no-untyped-def]
    resident = 4 * SMS
    assert grid_for(*dispatch(BOTH, 32768))[0] == 1 + 1 + resident + 1 + resident
    assert grid_for(*combine(BOTH, 32768))[0] == 1 + (1 + 2 * resident) + 1 + resident


def test_no_tokens_still_launch_a_sender_and_a_receiver(grid_for) -> None:  # type: ignore[no-untyped-def]
    assert grid_for(*dispatch(BOTH, 0))[0] == 1 + 1 + 1 + 1 + 1
    assert grid_for(*combine(BOTH, 0))[0] == 1 + 2 + 2


def test_one_multiprocessor_is_enough(grid_for) -> None:  # type: ignore[no-untyped-def]
    assert grid_for(*dispatch(BOTH, 128, sms=1))[0] == 1 + 1 + 4 + 1 + 4
    assert grid_for(*combine(BOTH, 128, sms=1))[0] == 1 + 1 + 8 + 1 + 4


def test_a_norm_keeps_a_row_in_one_block(grid_for) -> None:  # type: ignore[no-untyped-def]
    assert grid_for(*combine(BOTH, 4, norms=1))[4] == 0
    assert grid_for(*combine(RECV, 32768, norms=1))[0] == 1 + 1 + 2 * SMS


@pytest.mark.parametrize(
    ("hidden", "threads"), [(7168, 224), (512, 128), (16384, 224), (4096, 128), (6144, 192)]
)
def test_threads_follow_the_row(grid_for, hidden: int, threads: int) -> None:  # type: ignore[no-untyped-def]
    assert grid_for(*dispatch(SEND, 8, hidden))[1] == threads
