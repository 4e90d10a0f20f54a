"""Free memory of this host's GPUs, from the driver's management library, without a context on any of them."""

from __future__ import annotations

import ctypes

LIBRARY = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    """nvmlMemory_t, bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def least_free_memory(library: str = LIBRARY) -> int:
    """Free bytes of the GPU that has the fewest; 0 if there is no GPU, or no such library."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return 0
    if nvml.nvmlInit_v2() != 0:
        return 0
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return 0
        return min((_free(nvml, index) for index in range(count.value)), default=0)
    finally:
        nvml.nvmlShutdown()


def _free(nvml: ctypes.CDLL, index: int) -> int:
    device, memory = ctypes.c_void_p(), _Memory()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
        return 0
    return int(memory.free) if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0 else 0
