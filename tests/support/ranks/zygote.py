"""Starts rank processes, and whole servers, as forks of a process that has imported torch already.

Importing torch costs every rank two seconds of CPU time; most tests of ranks need little else. A fork is a
child of the process that asks for it, with the descriptors, arguments and environment of a process that was
executed. Tests of the real start: tests/integration/ranks/test_process.py, tests/e2e.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import platform
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ep_server.ranks import process
from ep_server.ranks.life import die_with

CLONE_PARENT, SYS_CLONE = 0x8000, 56  # of x86-64
PRELOADED = (
    *("torch", "ep_server.ranks.build", "ep_server.ranks.devices", "ep_server.ranks.exchanges"),
    "ep_server.cli.main",
)
WITHOUT_TORCH = "tests.support.ranks.odd_rank"
HIGH = 1000  # descriptors from here on are nobody's
CAN_FORK = platform.machine() == "x86_64"


class Forked:
    """What RankProcess uses of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and timeout is not None:
            end = os.pidfd_open(self.pid)
            try:
                if not select.select([end], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("a fork", timeout)
            finally:
                os.close(end)
        if self.returncode is None:
            self._ended(0)
        return self.returncode

    def poll(self) -> int | None:
        if self.returncode is None:
            self._ended(os.WNOHANG)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, options: int) -> None:
        pid, status = os.waitpid(self.pid, options)
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)


class Zygote:
    """The process that forks: a child of this one, behind a socket."""

    def __init__(self, ours: socket.socket) -> None:
        self._socket = ours
        self._one_at_a_time = threading.Lock()

    def popen(
        self, command: Sequence[str], *, pass_fds: Sequence[int], **options: Any
    ) -> Forked | subprocess.Popen[bytes]:
        """A fork that runs what subprocess.Popen would start; a module that needs no torch is started."""
        path, module, *arguments = command[command.index(process.BOOTSTRAP) + 1 :]
        if module == WITHOUT_TORCH:
            return subprocess.Popen(command, pass_fds=pass_fds, **options)
        return self.fork(module, arguments, {fd: fd for fd in (1, 2, *pass_fds)}, json.loads(path))

    def fork(
        self,
        module: str,
        arguments: Sequence[str],
        descriptors: dict[int, int],
        path: Sequence[str] | None = None,
    ) -> Forked:
        """Runs a module as a program.

        Args:
            descriptors: of this process, by the numbers that they have in the fork.
            path: sys.path; None = of this process.
        """
        job = {
            "path": path or process.import_path(),
            "module": module,
            "arguments": arguments,
            "environ": dict(os.environ),
            "folder": str(Path.cwd()),
            "descriptors": list(descriptors),
        }
        with self._one_at_a_time:
            socket.send_fds(self._socket, [json.dumps(job).encode()], list(descriptors.values()))
            return Forked(int(self._socket.recv(32)))


@cache
def zygote() -> Zygote:
    """That of this process, for the rest of its life."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-P", "-c", process.BOOTSTRAP, json.dumps(process.import_path())]
        command += ["tests.support.ranks.zygote", str(theirs.fileno()), str(os.getpid())]
        alone = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # its threads would be missing in a fork
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=alone)
    ours.recv(1)
    atexit.register(started.wait, 30)
    atexit.register(ours.close)
    return Zygote(ours)


def start_server(arguments: Sequence[str], output: int) -> Forked | subprocess.Popen[bytes]:
    """Runs `ep-server`, it and its ranks as forks where that can be. output: a descriptor."""
    if CAN_FORK:
        return zygote().fork("tests.support.cluster.forked_node", ["", *arguments], {1: output, 2: output})
    return subprocess.Popen([sys.executable, "-m", "ep_server", *arguments], stdout=output, stderr=output)


def forked_zygote() -> Zygote:
    """A fork of this process, which is one itself and has one thread yet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        ours.close()
        die_with(parent)
        serve(theirs)
        os._exit(0)
    theirs.close()
    return Zygote(ours)


def fork_ranks(zygote: Zygote) -> None:
    """From now on this process starts its ranks as forks."""
    process.subprocess = SimpleNamespace(Popen=zygote.popen, DEVNULL=subprocess.DEVNULL)


@contextmanager
def forking() -> Iterator[None]:
    """Meanwhile this process starts its ranks as forks."""
    real = process.subprocess
    if CAN_FORK:
        fork_ranks(zygote())
    try:
        yield
    finally:
        process.subprocess = real


def main() -> None:
    ours = socket.socket(fileno=int(sys.argv[1]))
    die_with(int(sys.argv[2]))
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # the forks share what nobody writes to
    ours.send(b"r")
    serve(ours)


def serve(ours: socket.socket) -> None:
    """Forks until the other end is closed."""
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
        sys.modules.pop(job["module"], None)  # runpy warns of a module that is imported already
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
