"""Free memory of GPUs, from a management library of the test's own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ep_server.ranks.gpu_memory import least_free_memory

LIBRARY = """
#include <stdint.h>
typedef struct { unsigned long long total, free, used; } Memory;
static int devices[8];
int nvmlInit_v2(void) { return INIT; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = COUNT; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) { *device = &devices[index]; return 0; }
int nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
  const long index = (int*)device - devices;
  memory->total = 1ull << 40;
  memory->free = (100ull + 7 * ((index + 1) % COUNT)) << 30;
  memory->used = 0;
  return 0;
}
"""


@pytest.mark.parametrize(
    ("init", "count", "free"), [(0, 3, 100 << 30), (0, 1, 100 << 30), (9, 3, 0), (0, 0, 0)]
)
def test_the_gpu_with_the_least_counts(tmp_path: Path, init: int, count: int, free: int) -> None:
    source, library = tmp_path / "nvml.c", tmp_path / "libnvml.so"
    source.write_text(
        LIBRARY.replace("INIT", str(init)).replace("COUNT", str(count or 1)) if count else _none()
    )
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    assert least_free_memory(str(library)) == free


def _none() -> str:
    return LIBRARY.replace("INIT", "0").replace("*count = COUNT", "*count = 0").replace("COUNT", "1")


def test_without_a_library_there_is_none() -> None:
    assert least_free_memory("libthere-is-none.so.1") == 0
