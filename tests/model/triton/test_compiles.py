"""Every kernel compiles for compute capability 9.0 at real models' shapes, and fits a multiprocessor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model.triton.shapes import PARTS

SHARED_LIMIT = 227 << 10  # bytes of shared memory a block may have


@pytest.mark.parametrize("part", [part.__name__ for part in PARTS])
def test_compiles_for_sm90(part: str, tmp_path: Path) -> None:
    """Without a spilled register, where a block fits a multiprocessor."""
    settings = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.triton.shapes", part],
        env=os.environ | settings, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert kernels
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_LIMIT and kernel["stack"] == 0, kernel
        assert kernel["registers"] * 32 * kernel["warps"] <= 1 << 16, kernel
