"""The benchmark of changes runs, and no stream goes wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_change_is_made_and_timed() -> None:
    options = ("--rounds", "1", "--ranks", "1", "2", "--streams", "4", "--new", "20", "40", "--pause", "0.2")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "scale_and_update.py"), *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout.split("|---|---|---|---|---|")[1]
    for change in ("none", "1 -> 2 ranks", "new weights", "2 -> 1 ranks"):
        assert f"| {change} | " in table
    assert "0 went wrong" in table
