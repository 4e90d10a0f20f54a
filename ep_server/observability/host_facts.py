"""What a host is like, for reports of faults: cores, memory, NUMA nodes, limits, GPUs. Reads no environment.

Everything is text as the system gives it; what is not there is left out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

GPU_SECONDS = 20.0  # for nvidia-smi, which may hang where a GPU does
FILES = (
    "/proc/meminfo",
    "/proc/loadavg",
    "/proc/pressure/cpu",
    "/proc/pressure/memory",
    "/sys/fs/cgroup/cpu.max",
    "/sys/fs/cgroup/cpu.stat",
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory.current",
    "/sys/fs/cgroup/memory.events",
    "/sys/kernel/mm/transparent_hugepage/enabled",
)


def host_facts() -> dict[str, str]:
    """Name or path -> text."""
    facts = {"usable cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}", "cpu": _cpu()}
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist"))
    for path in (*map(Path, FILES), *nodes):
        with suppress(OSError, UnicodeDecodeError):
            facts[str(path)] = path.read_text()
    return facts | _gpus()


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "unknown"


def _gpus() -> dict[str, str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    facts = {}
    for arguments in (("-L",), ("topo", "-m"), ("-q", "-d", "MEMORY,CLOCK,ECC,TEMPERATURE")):
        with suppress(OSError, subprocess.SubprocessError):
            line = [tool, *arguments]
            done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=GPU_SECONDS)
            facts[f"nvidia-smi {' '.join(arguments)}"] = done.stdout
    return facts
