"""Builds the native modules from csrc/: `ep_server._C` with a C++20 compiler, `ep_server._cuda` with nvcc.

`_C` includes the libfabric transport if the headers of libfabric are installed. The library itself is loaded
at run time. Everything else about the package is in pyproject.toml. Environment:

    EP_SERVER_FABRIC       0: without the libfabric transport. 1: fail without its headers.
    EP_SERVER_CUDA         0: without `_cuda`. 1: fail without nvcc.
    EP_SERVER_BUILD_JOBS   parallel compilations; by default one per core
    CUDA_HOME              where nvcc is; by default /usr/local/cuda
"""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

CUDA_SOURCES = [
    "csrc/kernels/hopper/attention/attention.cpp",
    "csrc/bindings/attention.cpp",
    "csrc/bindings/cuda_module.cpp",
    "csrc/bindings/experts.cpp",
    "csrc/bindings/loading.cpp",
    "csrc/bindings/mla.cpp",
    "csrc/bindings/nvlink.cpp",
    "csrc/bindings/prefill.cpp",
    "csrc/bindings/products.cpp",
    "csrc/bindings/shares.cpp",
    "csrc/exchange/nvlink/group.cpp",
    "csrc/kernels/hopper/experts/experts.cpp",
    "csrc/kernels/hopper/mla/mla.cpp",
    "csrc/kernels/hopper/prefill/prefill.cpp",
    "csrc/kernels/hopper/products/products.cpp",
    "csrc/kernels/hopper/shares/shares.cpp",
    "csrc/loading/staged_reader.cpp",
    "csrc/exchange/nvlink/peer_memory.cpp",
]
KERNELS = sorted(str(path) for path in Path("csrc").rglob("*.cu"))
SOURCES = sorted({str(path) for path in Path("csrc").rglob("*.cpp")} - set(CUDA_SOURCES))
FABRIC_SOURCES = sorted(str(path) for path in Path("csrc/exchange/fabric").glob("*.cpp"))
ParallelCompile("EP_SERVER_BUILD_JOBS", default=0).install()


def find_fabric_headers() -> bool:
    """Whether the libfabric transport is built."""
    wanted = os.environ.get("EP_SERVER_FABRIC", "auto")
    compiler = os.environ.get("CXX", "g++").split()
    line = [*compiler, "-E", "-x", "c++", "-include", "rdma/fi_rma.h", os.devnull]
    try:
        found = subprocess.run(line, capture_output=True, check=False).returncode == 0
    except OSError:
        found = False
    if wanted == "1" and not found:
        raise SystemExit("EP_SERVER_FABRIC=1, but the compiler finds no rdma/fi_rma.h: install libfabric-dev")
    return found and wanted != "0"


FABRIC = find_fabric_headers()

native = Pybind11Extension(
    "ep_server._C",
    [source for source in SOURCES if FABRIC or source not in FABRIC_SOURCES],
    define_macros=[("EP_SERVER_FABRIC", "1")] if FABRIC else [],
    include_dirs=["csrc"],
    depends=sorted(str(path) for kind in ("*.hpp", "*.inc") for path in Path("csrc").rglob(kind)),
    cxx_std=20,
    # -ffp-contract=off: multiply and add stay two roundings, so CPU, GPU and the oracle agree bit for bit.
    extra_compile_args=[
        "-O3",
        "-g1",
        "-Wall",
        "-Wextra",
        "-ffp-contract=off",
        "-fvisibility=hidden",
        "-pthread",
    ],
    extra_link_args=["-pthread", "-lrt", "-ldl"],
)

GPU_CODE = [
    "-gencode=arch=compute_80,code=sm_80",  # without FP8 instructions and overlapping launches
    "-gencode=arch=compute_90a,code=sm_90a",
    "-gencode=arch=compute_90,code=compute_90",  # PTX for GPUs newer than Hopper
]
NVCC_FLAGS = [
    "-std=c++20",
    "-O3",
    "-fmad=false",
    "-Icsrc",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-Xptxas=-v",
]


def find_nvcc() -> Path | None:
    """nvcc, or None if `_cuda` is not built."""
    wanted = os.environ.get("EP_SERVER_CUDA", "auto")
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("nvcc", path=f"{home}/bin{os.pathsep}{os.environ.get('PATH', '')}")
    if wanted == "1" and found is None:
        raise SystemExit("EP_SERVER_CUDA=1, but there is no nvcc in CUDA_HOME or PATH")
    return None if wanted == "0" or found is None else Path(found).resolve()


class Build(build_ext):
    """build_ext that compiles the kernels first and links them into the extension."""

    def build_extension(self, ext: Pybind11Extension) -> None:
        """Compiles the kernels, then the rest."""
        kernels = getattr(ext, "kernels", [])
        if kernels:
            folder = Path(self.build_temp) / "kernels"
            folder.mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                ext.extra_objects = list(
                    pool.map(lambda source: self.compile_kernel(source, folder), kernels)
                )
        super().build_extension(ext)

    def compile_kernel(self, source: str, folder: Path) -> str:
        """Compiles a .cu file to an object. ptxas' report is written beside it."""
        made = folder / (Path(source).stem + ".o")
        command = [str(NVCC), *NVCC_FLAGS, *GPU_CODE, "-c", source, "-o", str(made)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        made.with_suffix(".ptxas").write_text(ran.stderr)
        if ran.returncode:
            raise SystemExit(f"{' '.join(command)}\n{ran.stdout}{ran.stderr}")
        return str(made)


NVCC = find_nvcc()
extensions = [native]
if NVCC is not None:
    toolkit = NVCC.parent.parent
    libraries = [
        path for path in (toolkit / "lib64", toolkit / "lib") if (path / "libcudart_static.a").exists()
    ]
    cuda = Pybind11Extension(
        "ep_server._cuda",
        CUDA_SOURCES,
        include_dirs=["csrc", str(toolkit / "include")],
        depends=sorted(str(path) for kind in ("*.hpp", "*.cuh", "*.cu") for path in Path("csrc").rglob(kind)),
        cxx_std=20,
        extra_compile_args=["-O2", "-g1", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread"],
        library_dirs=[str(path) for path in libraries],
        # Link the CUDA runtime statically and hide its symbols: torch has another one. No driver is linked.
        extra_link_args=["-lcudart_static", "-Wl,--exclude-libs,ALL", "-pthread", "-lrt", "-ldl"],
    )
    cuda.kernels = KERNELS
    extensions.append(cuda)

setup(ext_modules=extensions, cmdclass={"build_ext": Build})
