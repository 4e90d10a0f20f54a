"""What the assembler says of the GPU kernels that were built: nothing spilled, no stack frame. Needs no GPU.

For Hopper, and for GPUs before it, whose kernels are the same without its instructions.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

ROOT = Path(__file__).parents[4]
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_kernel_spills(arch: str) -> None:
    """A thread that spills has a stack frame for it, so no frame says both."""
    built = pytest.importorskip("ep_server._cuda", reason="built without nvcc").__file__
    line = [str(CUOBJDUMP), "-arch", arch, "-res-usage", str(built)]
    usage = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60).stdout
    sources = len(list(ROOT.glob("csrc/**/*.cu")))
    assert usage.count(f"arch = {arch}\n") == sources, usage
    kernels = re.findall(r"Function (\S+):\s+REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert len(kernels) == usage.count("Function ") >= sources, usage
    assert not [name for name, *frame in kernels if frame != ["0", "0"]], usage


def test_the_package_works_without_a_driver() -> None:
    """Importing the exchange on the CPU loads nothing of CUDA's."""
    code = "import sys, ep_server.exchange.bootstrap; assert 'ep_server._cuda' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
