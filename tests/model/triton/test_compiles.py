"""Every kernel compiles for compute capability 9.0 at real models' shapes, and fits a multiprocessor."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

import ep_server.model.triton as triton_kernels
from tests.model.triton.shapes import PARTS

SHARED_LIMIT = 227 << 10  # bytes of shared memory a block may have
SPILL = 8 if triton.__version__.startswith("3.6.") else 0  # bytes that a thread may leave in memory
SHARED_OF_ALL, SHARED_PER_BLOCK = (
    228 << 10,
    1 << 10,
)  # of a multiprocessor; what the system takes of a block's


def test_every_kernel_compiles_for_sm90(tmp_path: Path) -> None:
    """The first variant of each."""
    sources = Path(triton_kernels.__file__).parent.glob("*.py")
    source = "\n".join(path.read_text() for path in sources)
    written = set(re.findall(r"^def (_\w+_kernel)\(", source, re.MULTILINE))
    assert {kernel["name"] for kernel in compiled(tmp_path, "--once")} == written


@pytest.mark.slow
def test_all_programs_of_the_experts_run_at_once(tmp_path: Path) -> None:
    """A program loops over tiles: one that starts when another has ended would run for as long again."""
    for kernel in compiled(tmp_path, "grouped"):
        threads, registers = 32 * kernel["warps"], -(-kernel["registers"] // 8) * 8
        by_shared = SHARED_OF_ALL // (kernel["shared"] + SHARED_PER_BLOCK)
        assert kernel["grid"][0] <= 132 * min(by_shared, (1 << 16) // (registers * threads)), kernel


@pytest.mark.slow
@pytest.mark.parametrize("part", [part.__name__ for part in PARTS])
def test_every_variant_compiles_for_sm90(part: str, tmp_path: Path) -> None:
    compiled(tmp_path, part)


def compiled(cache: Path, *arguments: str) -> list[dict[str, Any]]:
    """The kernels: each fits a multiprocessor, and none spills registers that is meant to be fast."""
    settings = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.triton.shapes", *arguments],
        env=os.environ | settings, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert kernels
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_LIMIT, kernel
        assert kernel["stack"] <= SPILL or kernel["part"] == "small_float32", kernel
        assert kernel["registers"] * 32 * kernel["warps"] <= 1 << 16, kernel
    return kernels
