"""Network namespaces that stand for hosts: one veth pair each into a bridge of a namespace of their own.

Needs root and iproute2; leaves nothing behind. Addresses are 198.18.0.1, .2, ... (for benchmarks, RFC 2544).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

DEVICE = "net0"  # inside every namespace
CLONE_NEWNET = 0x40000000


def missing() -> str:
    """ "" or why no namespace can be made here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    name = f"ep{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


def enter(name: str) -> None:
    """Moves this process into a named namespace. Call it before the process starts threads."""
    with Path(f"/run/netns/{name}").open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {name}")


class Hosts:
    """`with Hosts(2) as hosts:` namespaces hosts.names, which reach one another at hosts.address(i)."""

    def __init__(self, count: int) -> None:
        tag = secrets.token_hex(3)
        self.switch = f"ep{tag}s"
        self.names = [f"ep{tag}h{i}" for i in range(count)]

    def __enter__(self) -> Hosts:
        try:
            _ip("netns", "add", self.switch)
            _ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", self.switch, "link", "set", "br0", "up")
            for i, name in enumerate(self.names):
                self._add(i, name)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in (*self.names, self.switch):  # their devices go with them
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)

    def address(self, host: int) -> str:
        """The IP address of a host."""
        return f"198.18.0.{host + 1}"

    def cut(self, host: int) -> None:
        """Takes a host off the network: nothing is delivered, nobody is told."""
        _ip("-n", self.switch, "link", "set", f"port{host}", "nomaster")

    def mend(self, host: int) -> None:
        """Connects a host again."""
        _ip("-n", self.switch, "link", "set", f"port{host}", "master", "br0")

    def limit(self, host: int, rate: str) -> None:
        """All that a host sends leaves at no more than `rate`, in the words of tc; what exceeds it waits."""
        limit = ("rate", rate, "burst", "4kb", "latency", "2s")
        _run("tc", "-n", self.names[host], "qdisc", "replace", "dev", DEVICE, "root", "tbf", *limit)

    def _add(self, number: int, name: str) -> None:
        port = f"port{number}"
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", name)
        _ip("-n", self.switch, "link", "set", port, "master", "br0", "up")
        _ip("-n", name, "address", "add", f"{self.address(number)}/24", "dev", DEVICE)
        _ip("-n", name, "link", "set", DEVICE, "up")


def _ip(*args: str) -> None:
    _run("ip", *args)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
