"""Packs FlashInfer for another machine, as a folder of packages: its Python, and modules compiled here.

    python3 scripts/gpu_flashinfer.py FILE.tar.gz PYTHON_VERSION

Needs a network and nvcc, no GPU. What is not in MODULES cannot run there: the sources are large and stay
behind, but for KEPT. FlashInfer loads a compiled module from flashinfer/data/aot before it compiles one.
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
HEADERS = "nvidia-curand==10.4.5.25"  # of CUDA 13, which FA3 includes; a small toolkit lacks them
# Modules, as Python with a name for each type.
# XQA: block size, head dim, query heads of a KV head, with a window.
MODULES = [
    "xqa.gen_xqa_module(bf16, bf16, 16, 128, 8, False, bf16)",  # Qwen3-30B-A3B
    "xqa.gen_xqa_module(bf16, bf16, 16, 128, 8, True, bf16)",
    "xqa.gen_xqa_module(bf16, bf16, 16, 128, 4, False, bf16)",  # Mixtral 8x7B
    "xqa.gen_xqa_module(bf16, bf16, 16, 16, 2, False, bf16)",  # the smallest checkpoint of the tests
    # benchmarks/gpu_chunk_attention.py: head dims 128, no rotation, window or cap
    "attention.gen_batch_prefill_module('fa3', bf16, bf16, bf16, int32, 128, 128, 0, False, False, False)",
]
KEPT = "batch_prefill*sm90*"  # templates that FlashInfer fills in before it looks for that module
BUILD = """
import sys
from flashinfer.jit import attention, xqa
from torch import bfloat16 as bf16, int32
spec = eval(sys.argv[1])
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
    install(scratch / "site", [*PACKAGES, *IMPORTED.split(), HEADERS])
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
        "CPATH": f"{scratch}/site/nvidia/cu13/include",
        "FLASHINFER_WORKSPACE_BASE": str(scratch),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
    }
    made = []
    for module in MODULES:
        command = [sys.executable, "-c", BUILD, module]
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
    kept = {file.name: file.read_bytes() for file in (data / "csrc").glob(KEPT)}
    shutil.rmtree(data)
    (data / "csrc").mkdir(parents=True)
    for name, content in kept.items():
        (data / "csrc" / name).write_bytes(content)
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
