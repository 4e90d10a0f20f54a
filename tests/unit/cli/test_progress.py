"""What is shown while ranks load, on a terminal and without one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ep_server.cli.progress import Bars


@pytest.mark.parametrize("console", [None, Console(file=io.StringIO())], ids=["no console", "no terminal"])
def test_without_a_terminal_a_stage_is_told_once_when_it_is_done(console: Console | None) -> None:
    said: list[str] = []
    with Bars(console, said.append) as bars:
        for done in (0, 1, 2, 2):
            bars.loading(0, "weights", done, 2)
        bars.loading(1, "weights", 2, 2)
        bars.loading(0, "warm-up", 1, 1)
        bars.show("sums", 1, 1)
    assert said == ["rank 0 weights: 2/2", "rank 1 weights: 2/2", "rank 0 warm-up: 1/1", "sums: 1/1"]


def test_on_a_terminal_there_are_bars_and_no_lines() -> None:
    terminal, said = io.StringIO(), []
    with Bars(Console(file=terminal, force_terminal=True, width=80), said.append) as bars:
        bars.loading(1, "weights", 2, 2)
        bars.loading(1, "warm-up", 0, 1)
        bars.close()
        bars.close()
    assert "rank 1 warm-up" in terminal.getvalue() and "0/1" in terminal.getvalue()
    assert said == []
