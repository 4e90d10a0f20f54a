"""What the compiler says of the GPU kernels: nothing spilled, no stack frame. Needs nvcc, no GPU.

For Hopper, and for GPUs before it, whose kernels are the same without its instructions.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NVCC = shutil.which("nvcc", path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin:{os.environ['PATH']}")


@pytest.mark.skipif(NVCC is None, reason="no CUDA toolkit on this machine: the wheel has no CUDA part either")
@pytest.mark.parametrize("source", sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/*/*.cu")))
@pytest.mark.parametrize("arch", ["80", "90a"])
def test_no_kernel_spills(arch: str, source: str, tmp_path: Path) -> None:
    command = [
        str(NVCC), "-std=c++20", "-O3", "-fmad=false", "-Icsrc", "-Xptxas=-v",
        f"-gencode=arch=compute_{arch},code=sm_{arch}", "-cubin",
        source, "-o", str(tmp_path / "kernels"),
    ]  # fmt: skip
    report = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert frames, report
    assert set(frames) == {("0", "0", "0")}, report


def test_the_package_works_without_a_driver() -> None:
    """Importing the exchange on the CPU loads nothing of CUDA's."""
    code = "import sys, ep_server.ep.bootstrap; assert 'ep_server._cuda' not in sys.modules"
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
