"""What is said where a GPU or its driver cannot share memory: the real code over a driver that refuses.

Needs CUDA's headers and a compiler, neither a driver nor a GPU.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.cuda_headers import HEADERS, needs_headers

ROOT = Path(__file__).parents[4]
pytestmark = needs_headers
WHOLE = 2 << 20  # a driver gives memory in pieces of this size
NO_ACCESS = "GPU 3 has no peer access to this memory (NVLink or PCIe P2P): operation not supported"
VIRTUAL_MEMORY, DESCRIPTORS = "102", "103"  # CU_DEVICE_ATTRIBUTE_*_SUPPORTED


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("nvlink") / "driver"
    sources = ("tests/support/exchange/nvlink_driver.cpp", "csrc/exchange/nvlink/peer_memory.cpp")
    line = ["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-Icsrc", "-isystem", str(HEADERS), *sources]
    subprocess.run([*line, "-o", str(made)], cwd=ROOT, check=True)
    return made


@pytest.mark.parametrize(
    ("call", "refused", "said"),
    [
        ("create", "nothing", f"{WHOLE} bytes"),
        ("import", "nothing", f"{WHOLE} bytes"),
        ("import", "cuMemSetAccess", NO_ACCESS),
        ("create", "cuMemSetAccess", NO_ACCESS),
        ("import", "cuMemMap", "cuMemMap: operation not supported"),
        ("import", "cuMemAddressReserve", "cuMemAddressReserve: operation not supported"),
        (
            "import",
            "cuMemImportFromShareableHandle",
            "the peer's memory cannot be imported: operation not supported",
        ),
        ("create", "cuMemCreate", f"{WHOLE} bytes for the exchange on GPU 3: operation not supported"),
        ("create", VIRTUAL_MEMORY, "GPU 3 has no virtual memory management"),
        ("create", DESCRIPTORS, "GPU 3 has no memory that can be passed on"),
        ("create", "no cuMemCreate", "the driver has no cuMemCreate"),
        ("create", "cudaSetDevice", "GPU 3: invalid device ordinal"),
        (
            "create",
            "cudaMemsetAsync ends",
            "zeroing memory that peers write has not ended on the GPU in 0.05 s",
        ),
    ],
)
def test_what_is_missing_is_said_and_nothing_is_left(
    program: Path, call: str, refused: str, said: str
) -> None:
    ended = subprocess.run([program, call, refused], capture_output=True, text=True, check=True, timeout=20)
    assert ended.stdout.splitlines() == [said, "0 left"]
