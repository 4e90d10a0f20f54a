"""Starts rank processes as forks of a process that has imported torch already.

Importing torch costs every rank more than a second of CPU time; most tests of ranks need little else. A fork
is a child of the test's own process, with the descriptors, arguments and environment of a process that was
executed. Tests of the real start: tests/integration/ranks/test_process.py, tests/e2e.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import importlib
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ep_server.ranks import process
from ep_server.ranks.life import die_with

CLONE_PARENT, SYS_CLONE = 0x8000, 56  # of x86-64
PRELOADED = ("torch", "ep_server.ranks.build", "ep_server.ranks.devices", "ep_server.ranks.exchanges")
WITHOUT_TORCH = "tests.support.ranks.odd_rank"
HIGH = 1000  # descriptors from here on are nobody's


class Forked:
    """What RankProcess uses of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def wait(self) -> int:
        if self.returncode is None:
            self._ended(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            self._ended(os.WNOHANG)
        if self.returncode is None:
            os.kill(self.pid, number)

    def _ended(self, options: int) -> None:
        pid, status = os.waitpid(self.pid, options)
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)


class Zygote:
    """The process that forks."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", "-c", process.BOOTSTRAP, json.dumps(process.import_path())]
            command += ["tests.support.ranks.zygote", str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self._socket.recv(1)

    def popen(
        self, command: Sequence[str], *, pass_fds: Sequence[int], **options: Any
    ) -> Forked | subprocess.Popen[bytes]:
        """A fork that runs what subprocess.Popen would start; a module that needs no torch is started."""
        path, module, *arguments = command[command.index(process.BOOTSTRAP) + 1 :]
        if module == WITHOUT_TORCH:
            return subprocess.Popen(command, pass_fds=pass_fds, **options)
        job = {
            "path": json.loads(path),
            "module": module,
            "arguments": arguments,
            "environ": dict(os.environ),
            "folder": str(Path.cwd()),
            "descriptors": [1, 2, *pass_fds],
        }
        socket.send_fds(self._socket, [json.dumps(job).encode()], [1, 2, *pass_fds])
        return Forked(int(self._socket.recv(32)))

    def close(self) -> None:
        self._socket.close()
        self._process.wait(30)


@contextmanager
def forking() -> Iterator[None]:
    """Meanwhile this process starts its ranks as forks."""
    if platform.machine() != "x86_64":
        yield
        return
    zygote, real = Zygote(), process.subprocess
    process.subprocess = SimpleNamespace(Popen=zygote.popen, DEVNULL=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.subprocess = real
        zygote.close()


def main() -> None:
    ours = socket.socket(fileno=int(sys.argv[1]))
    die_with(int(sys.argv[2]))
    for name in PRELOADED:
        importlib.import_module(name)
    ours.send(b"r")
    while True:
        text, descriptors, _, _ = socket.recv_fds(ours, 1 << 20, 64)
        if not text:
            return
        pid = fork_sibling()
        if pid == 0:
            ours.close()
            run(json.loads(text), descriptors)
        for fd in descriptors:
            os.close(fd)
        ours.send(str(pid).encode())


def fork_sibling() -> int:
    """As os.fork(), but the child has this process's parent for its own."""
    libc, python = ctypes.PyDLL(None, use_errno=True), ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = libc.syscall(SYS_CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return int(pid)


def run(job: dict[str, Any], descriptors: list[int]) -> None:
    """The life of a fork. Does not return."""
    code: Any = 1
    try:
        os.setpgid(0, 0)
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH) for fd in descriptors]
        for fd in descriptors:
            os.close(fd)
        for fd, target in zip(moved, job["descriptors"], strict=True):
            os.dup2(fd, target)
            os.close(fd)
        os.environ.clear()
        os.environ.update(job["environ"])
        os.chdir(job["folder"])
        sys.path[:], sys.argv = job["path"], ["-c", *job["arguments"]]
        runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as exit:
        code = 0 if exit.code is None else exit.code
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
