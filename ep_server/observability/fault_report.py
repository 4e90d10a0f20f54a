"""The contents of a fault report: versions, facts about the host, and the last steps as a trace.

Host facts are text as the system prints it; facts that are missing are left out. Libraries are not imported
to learn their versions. The trace opens in Perfetto and chrome://tracing, one track per rank.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import ep_server

LIBRARIES = (
    "torch",
    "grpcio",
    "protobuf",
    "uvloop",
    "prometheus-client",
    "safetensors",
    "tokenizers",
    "numpy",
)


def versions() -> dict[str, str]:
    """ep_server, python, kernel and the libraries, by name; "absent" for one that is not installed."""
    return {
        "ep_server": ep_server.__version__,
        "python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        **{name: _version(name) for name in LIBRARIES},
    }


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "absent"


GPU_SECONDS = 20.0  # for nvidia-smi, which may hang if a GPU does
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


OF_STATUS = re.compile(
    r"^(State|VmRSS|VmSwap|Threads|Cpus_allowed_list|Mems_allowed_list|\w*voluntary_ctxt_switches):\s*(.*)$",
    re.MULTILINE,
)


def processes(proc: Path = Path("/proc")) -> dict[str, dict[str, Any]]:
    """Processes of ep_server by pid: state, memory, cores, and each thread's state by number and name."""
    found = {}
    for folder in proc.glob("[0-9]*"):
        with suppress(OSError, UnicodeDecodeError):
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            if any("ep_server" in word or "ep-server" in word for word in words):
                facts: dict[str, Any] = dict(OF_STATUS.findall((folder / "status").read_text()))
                facts["rank process"] = any("ranks.life" in word for word in words)
                facts["threads"] = _threads(folder)
                found[folder.name] = facts
    return found


def _threads(process: Path) -> dict[str, str]:
    """By number and name: state and CPU time in ticks. Those that end meanwhile are left out."""
    found = {}
    for task in sorted(process.glob("task/*")):
        with suppress(OSError):
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            found[f"{task.name} {name}"] = f"{fields[0]} {int(fields[11]) + int(fields[12])}"
    return found


PARTS = ("plan", "vote", "run", "publish")


class Step(Protocol):
    """One step of one rank; fields as of records.StepTrace."""

    rank: int
    step: int
    start_ns: int
    tokens: int
    sequences: int
    micro_batches: int


def chrome_trace(steps: Iterable[Step]) -> dict[str, Any]:
    """Trace events; times in microseconds since the earliest step. vote holds the wait for slower ranks."""
    known = list(steps)
    origin = min((step.start_ns for step in known), default=0)
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({step.rank for step in known})
    ]
    return {"traceEvents": [*names, *(event for step in known for event in _events(step, origin))]}


def _events(step: Step, origin: int) -> Iterable[dict[str, Any]]:
    begin = step.start_ns - origin
    facts = {
        "step": step.step,
        "tokens": step.tokens,
        "sequences": step.sequences,
        "micro_batches": step.micro_batches,
    }
    for part in PARTS:
        length = getattr(step, f"{part}_ns")
        where = {"ph": "X", "pid": 0, "tid": step.rank, "ts": begin / 1e3, "dur": length / 1e3}
        yield {"name": part, **where, "args": facts}
        begin += length
