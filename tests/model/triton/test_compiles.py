"""Every kernel compiles for compute capability 9.0 at real models' shapes, and fits a multiprocessor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.model.triton.shapes import PARTS

SHARED_LIMIT = 227 << 10  # bytes of shared memory a block may have


def test_every_kernel_compiles_for_sm90(tmp_path: Path) -> None:
    """The first variant of each."""
    kernels = compiled(tmp_path, "--once")
    assert {kernel["part"] for kernel in kernels} == {part.__name__ for part in PARTS}


@pytest.mark.slow
@pytest.mark.parametrize("part", [part.__name__ for part in PARTS])
def test_every_variant_compiles_for_sm90(part: str, tmp_path: Path) -> None:
    compiled(tmp_path, part)


def compiled(cache: Path, *arguments: str) -> list[dict[str, Any]]:
    """The kernels, none of which spills registers or is too large for a multiprocessor."""
    settings = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.triton.shapes", *arguments],
        env=os.environ | settings, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert kernels
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_LIMIT and kernel["stack"] == 0, kernel
        assert kernel["registers"] * 32 * kernel["warps"] <= 1 << 16, kernel
    return kernels
