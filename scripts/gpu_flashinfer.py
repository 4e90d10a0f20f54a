"""Packs FlashInfer for another machine, as a folder of packages: its Python, and modules compiled here.

    python3 scripts/gpu_flashinfer.py FILE.tar.gz PYTHON_VERSION

Needs a network and nvcc, no GPU. What is not in MODULES cannot run there: the sources are large and stay
behind. FlashInfer loads a compiled module from flashinfer/data/aot before it looks for sources.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PINS = Path(__file__).parents[1] / "constraints-cuda.txt"
PACKAGES = ["flashinfer-python", "apache-tvm-ffi"]
# What importing it takes beside torch; a machine with GPUs has these.
IMPORTED = (
    "einops requests urllib3 certifi idna charset-normalizer tabulate tqdm packaging nvidia-ml-py ninja"
)
# Block size, head dim, query heads of a KV head, with a window.
MODULES = [
    (16, 128, 8, False),  # Qwen3-30B-A3B
    (16, 128, 8, True),
    (16, 128, 4, False),  # Mixtral 8x7B
    (16, 16, 2, False),  # the smallest checkpoint of the tests
]
BUILD = """
import sys, torch
from flashinfer.jit.xqa import gen_xqa_module
bf16 = torch.bfloat16
spec = gen_xqa_module(bf16, bf16, *map(int, sys.argv[1:4]), sys.argv[4] == "True", bf16)
spec.build(verbose=False)
print(spec.jit_library_path)
"""
PLATFORMS = ["manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"]


def install(target: Path, packages: list[str], *more: str) -> None:
    """As given, without what they ask for."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed", "--no-compile"]
    subprocess.run([*pip, "-c", str(PINS), "--target", str(target), *more, *packages], check=True)


def compiled(scratch: Path) -> list[Path]:
    """Shared objects of all MODULES, for compute capability 9.0."""
    install(scratch / "site", [*PACKAGES, *IMPORTED.split()])
    stub = scratch / "libcuda.so"  # the linker wants one; the driver's is found where the module runs
    subprocess.run(
        ["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(stub), "-x", "c", os.devnull], check=True
    )
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    settings = {
        "PYTHONPATH": str(scratch / "site"),
        "PATH": f"{scratch}/site/bin{os.pathsep}{os.environ['PATH']}",
        "CUDA_HOME": home,
        "LIBRARY_PATH": str(scratch),
        "FLASHINFER_WORKSPACE_BASE": str(scratch),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
    }
    made = []
    for module in MODULES:
        command = [sys.executable, "-c", BUILD, *map(str, module)]
        ran = subprocess.run(
            command, env=os.environ | settings, check=True, stdout=subprocess.PIPE, text=True
        )
        made.append(Path(ran.stdout.splitlines()[-1]))
    return made


def fill(folder: Path, python: str, scratch: Path) -> None:
    """Packages for that Python, with the modules in place of the sources."""
    binary = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    install(folder, PACKAGES, *binary, *(word for name in PLATFORMS for word in ("--platform", name)))
    data = folder / "flashinfer" / "data"
    shutil.rmtree(data)
    for module in compiled(scratch):
        place = data / "aot" / module.stem
        place.mkdir(parents=True)
        shutil.copy(module, place)


def main() -> None:
    packed, python = Path(sys.argv[1]), sys.argv[2]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "packed"
        fill(folder, python, Path(scratch))
        with tarfile.open(packed, "w:gz") as archive:
            archive.add(folder, ".")


if __name__ == "__main__":
    main()
