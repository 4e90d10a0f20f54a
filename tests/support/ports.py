"""Loopback ports for servers whose port a test must know before they start, or that use one again.

A port that the kernel has chosen is anybody's again once it is closed: the next bind or connect of a test
that runs beside this one may get it. Those here lie below the kernel's range, and each test process has its
own.
"""

from __future__ import annotations

import itertools
import socket
from pathlib import Path

_EACH = 64  # of a test process
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST, _END = 16384, int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32768


def _claimed() -> tuple[socket.socket, range]:
    """Ports that no other process claims, for as long as the socket is open: its abstract name says so."""
    for first in range(_FIRST, _END - _EACH + 1, _EACH):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0ep-server-test-ports-{first}")
        except OSError:
            claim.close()
            continue
        return claim, range(first, first + _EACH)
    raise RuntimeError("too many test processes")


_CLAIM, _PORTS = _claimed()  # at import: tests count the descriptors that they leave
_NEXT = itertools.cycle(_PORTS)


def free_port() -> int:
    """One that nobody listens at, and that no other test process takes."""
    for port in itertools.islice(_NEXT, _EACH):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise RuntimeError(f"ports {_PORTS[0]} to {_PORTS[-1]} are all in use")
