"""What the assembler says of the GPU kernels that were built: nothing spilled, no stack frame. Needs no GPU.

For Hopper, and for GPUs before it, whose kernels are the same without its instructions.
"""

from __future__ import annotations

import ast
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


def test_the_stub_has_the_keywords_of_the_module() -> None:
    module = pytest.importorskip("ep_server._cuda", reason="built without nvcc")
    stub = ast.parse((ROOT / "ep_server/_cuda.pyi").read_text())
    classes = [node for node in stub.body if isinstance(node, ast.ClassDef)]
    assert {each.name for each in classes} == {
        name for name in vars(module) if isinstance(getattr(module, name), type)
    }
    for each in classes:
        for method in (node for node in each.body if isinstance(node, ast.FunctionDef)):
            signature = str(getattr(getattr(module, each.name), method.name).__doc__).partition("->")[0]
            keywords = re.findall(r"(\w+): ", signature.partition("*,")[2])
            assert keywords == [a.arg for a in method.args.kwonlyargs], f"{each.name}.{method.name}"
