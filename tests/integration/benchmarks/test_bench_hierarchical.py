"""The benchmark of rows between hosts: it runs, checks its results and counts the rows of each way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.fabric.fabric_ends import needs

ROOT = Path(__file__).parents[3]


def test_both_ways_are_measured_and_their_rows_counted(tmp_path: Path) -> None:
    """Two experts, one on each of two hosts, and every token picks both."""
    needs("system")
    found = tmp_path / "rows.json"
    sizes = ("--hosts", "0", "1", "--tokens", "3", "--hidden", "64", "--experts", "2", "--top-k", "2")
    program = (str(ROOT / "benchmarks" / "bench_hierarchical.py"), "--device", "cpu", "--json", str(found))
    done = subprocess.run(
        [sys.executable, *program, *sizes], capture_output=True, text=True, check=False, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(found.read_text())["rows"]
    assert [row["kind"] for row in rows] == ["flat", "hierarchical"]
    for row in rows:
        assert (row["intra_rows"], row["inter_rows"]) == (3, 3)
        assert set(row["times_us"]) == {"dispatch", "combine", "pair"}
