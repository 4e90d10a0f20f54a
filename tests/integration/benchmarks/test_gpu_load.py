"""The benchmark of loading runs on a CPU, checks what it loads and counts what a rank reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.load_checkpoint import planned
from benchmarks.load_rank import read_piece
from ep_server.models.families import read_spec
from tests.support.models.checkpoints import CASES, random_model

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_every_way_is_timed_and_its_bytes_counted(tmp_path: Path) -> None:
    """Two ranks: each reads half of the experts, and all of the rest."""
    case = next(case for case in CASES if case.name == "qwen3_moe")
    config = random_model(case, 0).config.to_dict() | {"hidden_size": 1024, "vocab_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = {one.name: one.nbytes for one in planned(read_spec(tmp_path))}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    read = 2 * sum(sizes.values()) - experts
    program = (str(ROOT / "benchmarks" / "gpu_load.py"), "--device", "cpu", "--folder", str(tmp_path))
    options = ("--shape", str(tmp_path), "--ranks", "2", "--threads", "2", "--rounds", "1", "--cold")
    done = subprocess.run(
        [sys.executable, *program, *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    table = [line.replace(" x1", "-x1").split() for line in done.stdout.splitlines()[-6:]]
    assert [row[0] for row in table] == ["reading", "copying", "safetensors", "plain-x1", "plain", "engine"]
    assert {row[1] for row in table} == {f"{read / 1e9:.1f}"}
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    path, buffer = tmp_path / "model.safetensors", memoryview(bytearray(4))
    path.write_bytes(bytes(range(1, 11)))
    with path.open("rb", buffering=0) as file:
        read_piece(buffer, file, 3, 9)  # in two reads
        assert bytes(buffer) == bytes([8, 9, 6, 7])
        os.truncate(path, 5)
        with pytest.raises(OSError, match=r"model\.safetensors: bytes 3 to 9 are wanted, it ends at byte 5"):
            read_piece(buffer, file, 3, 9)
