"""Splits every bfloat16 into two e4m3 codes with the code of csrc/kernels/hopper/experts, on the CPU.

Needs CUDA's headers and a compiler, neither a driver nor a GPU.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.cuda_headers import HEADERS, needs_headers

ROOT = Path(__file__).parents[6]
pytestmark = needs_headers


def test_two_codes_have_the_bits_of_bfloat16(tmp_path: Path) -> None:
    """bfloat16 down to 2^-9 of the largest; all else is off by 2^-9 of itself or 2^-17 of the largest."""
    made, source = tmp_path / "two_codes", "tests/support/gpu/two_codes.cpp"
    line = ["g++", "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-Icsrc", "-isystem", str(HEADERS)]
    subprocess.run([*line, source, "-o", str(made)], cwd=ROOT, check=True, timeout=120)
    said = subprocess.run([made], check=True, capture_output=True, text=True, timeout=60).stdout.split()
    tried = dict(zip(said[::3], map(int, said[1::3]), strict=True))
    failed = dict(zip(said[::3], map(int, said[2::3]), strict=True))
    assert tried["bfloat16"] > 7_000_000 and tried["float"] == 2_000_000 and tried["not-finite"] == 2
    assert failed == {"bfloat16": 0, "float": 0, "not-finite": 0}
