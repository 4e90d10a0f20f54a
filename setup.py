"""Builds `ep_server._C` from csrc/ with a C++20 compiler. Nothing else happens at install time."""

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import find_packages, setup

SOURCES = sorted(str(path) for path in Path("csrc").rglob("*.cpp"))
ParallelCompile("EP_SERVER_BUILD_JOBS", default=0).install()

native = Pybind11Extension(
    "ep_server._C",
    SOURCES,
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
    extra_link_args=["-pthread", "-lrt"],
)

setup(
    name="ep-server",
    version="0.1.0",
    description="Expert-parallel decode server for Mixture-of-Experts models",
    long_description=Path("README.md").read_text(encoding="utf-8") if Path("README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["ep_server", "ep_server.*"]),
    package_data={"ep_server": ["py.typed", "_C.pyi", "assets/demo_model/*"]},
    ext_modules=[native],
    cmdclass={"build_ext": build_ext},
    install_requires=[
        "torch>=2.11,<2.14",
        "grpcio>=1.81.1,<2",
        "grpcio-health-checking>=1.81,<2",
        "grpcio-reflection>=1.81,<2",
        "protobuf>=6.33.5,<8",
        "uvloop>=0.21",
        "prometheus-client>=0.21",
        "safetensors>=0.5",
        "tokenizers>=0.21",
        "numpy>=1.26",  # torch looks for it on import and warns on every rank's stderr where it is not
        "typer>=0.15",
        "rich>=13",
    ],
    extras_require={
        "test": [
            "pytest>=8",
            "pytest-asyncio>=1",
            "pytest-timeout>=2.3",
            "hypothesis>=6",
            "transformers>=5.0,<6",
            "psutil>=6",
            "grpcio-tools==1.81.1",
        ],
        "check": ["ruff>=0.12", "mypy>=1.15", "clang-format>=19", "types-protobuf", "grpc-stubs"],
    },
    entry_points={"console_scripts": ["ep-server = ep_server.__main__:main"]},
    zip_safe=False,
)
