"""Where CUDA's headers are: for programs that use them on a CPU, without a driver or a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HEADERS = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
needs_headers = pytest.mark.skipif(
    not (HEADERS / "cuda.h").exists(),
    reason="no CUDA toolkit on this machine: the wheel has no CUDA part either",
)
