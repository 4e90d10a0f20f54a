"""Creates the memory of a group of ranks on one host, and says how much there is. Units: bytes.

The segment is anonymous, without a name. Knows sizes and descriptors, nothing of operations; no torch, for
the front creates the segment that its ranks inherit.
"""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

from ep_server import _C
from ep_server.errors import StartupError
from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.geometry import geometry_of, group_bytes


def create_segment(spec: ExchangeSpec) -> int:
    """Creates the memory of a group, all pages at once, before its ranks start.

    Args:
        spec: of any rank.
    Returns: a descriptor, close-on-exec. Ranks inherit it (`pass_fds`) and give it to ShmExchange; every
      holder closes its own. The memory is gone when the last mapping and descriptor are.
    Raises: ConfigError; StartupError with the numbers where the host has too little memory.
    """
    needed, available = group_bytes(spec), available_memory()
    if needed > available:
        raise _too_little(spec, needed, available)
    try:
        return _C.create_segment(geometry_of(spec))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise _too_little(spec, needed, available) from error
        raise StartupError(f"the exchange segment of {needed} bytes cannot be created: {error}") from error


def available_memory() -> int:
    """Bytes that this process may still get: what the host has and what its control group allows."""
    limits = [_meminfo_available()]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            limits.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(0, min(limits))


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def _too_little(spec: ExchangeSpec, needed: int, available: int) -> StartupError:
    return StartupError(
        f"the exchange of {spec.num_ranks} ranks needs {needed / 2**20:.1f} MiB of shared memory, "
        f"{available / 2**20:.1f} MiB are available: lower max_tokens ({spec.max_tokens}) "
        f"or num_banks ({spec.num_banks})"
    )
