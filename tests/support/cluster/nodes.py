"""Real `ep-server serve` processes that are one server: on the loopback, or one per network namespace.

Importing what they need takes longer than most of the tests, so they and their ranks are forks of a process
that has: see tests.support.ranks.zygote.

Logs are read as JSON lines all the time; whatever still runs is killed in the end. Units: seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import ep_server
from ep_server.testing.namespaces import DEVICE, Hosts
from tests.support.cluster.forked import ForkedProcess, fork
from tests.support.ports import free_port
from tests.support.ranks.zygote import CAN_FORK

DEMO_MODEL = Path(ep_server.__file__).parent / "assets" / "demo_model"
WAIT = 60.0  # after which a test has failed; the machine may be busy with much else
SERVING = re.compile(r"serving .* on (\S+:\d+), ")


@dataclass
class Node:
    """One process. lines: messages of its log so far; text: what it wrote that is no JSON."""

    inner: asyncio.subprocess.Process | ForkedProcess
    lines: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    address: str = ""
    _reading: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def process(self) -> psutil.Process:
        """The server itself, also where `ip` starts it (which becomes it)."""
        return psutil.Process(self.inner.pid)

    @property
    def ranks(self) -> list[psutil.Process]:
        """Its rank processes, in the order of ranks."""
        forked = isinstance(self.inner, ForkedProcess)
        return [
            child
            for child in self.process.children()
            if (os.getpgid(child.pid) == child.pid if forked else "ranks.life" in str(child.cmdline()))
        ]

    def signal(self, number: signal.Signals) -> None:
        self.inner.send_signal(number)

    async def serving(self, seconds: float = WAIT) -> str:
        """Waits until it serves. Returns: host:port."""
        await self.until(lambda: self.address, seconds)
        return self.address

    async def until(self, condition: Any, seconds: float = WAIT) -> None:
        """Waits for a condition over its log."""
        async with asyncio.timeout(seconds):
            while not condition():
                ended = self._reading is not None and self._reading.done()
                assert not ended, (self.lines[-10:], self.text[-10:])
                self._changed.clear()
                await self._changed.wait()

    async def end(self) -> int:
        """Waits for its end, and for the end of its log. Returns: the exit code."""
        async with asyncio.timeout(WAIT):
            code = await self.inner.wait()
            if self._reading is not None:
                await self._reading
        return code

    def said(self, pattern: str) -> bool:
        """Whether a line of the log matches."""
        return any(re.search(pattern, line) for line in (*self.lines, *self.text))

    async def read(self) -> None:
        """The log, to its end."""
        assert self.inner.stderr is not None
        while line := (await self.inner.stderr.readline()).decode():
            self._changed.set()
            try:
                message = str(json.loads(line)["message"])
            except (ValueError, TypeError, KeyError):
                self.text.append(line.rstrip())
            else:
                self.lines.append(message)
                if match := SERVING.search(message):
                    self.address = match[1]


def left(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run, given time to end."""
    gone, alive = psutil.wait_procs(processes, timeout=WAIT)
    assert len(gone) + len(alive) == len(processes)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@dataclass
class Nodes:
    """What nodes of one server have in common. hosts: a namespace for each; None = all on the loopback.

    options: of the command line, for all nodes. gpus: the CUDA_VISIBLE_DEVICES of each; none = all of them.
    forked: rather than executed, where that can be.
    """

    count: int = 2
    ranks: int = 1
    model: Path = DEMO_MODEL
    hosts: Hosts | None = None
    options: Sequence[str] = ()
    gpus: Sequence[str] = ()
    rendezvous: str = ""
    forked: bool = True
    started: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.rendezvous:
            port = free_port() if self.hosts is None else 50061
            self.rendezvous = f"{self.host(0)}:{port}"

    def host(self, node: int) -> str:
        return "127.0.0.1" if self.hosts is None else self.hosts.address(node)

    async def start(self, node: int, *options: str) -> Node:
        """Starts a node. options: for this one."""
        line = (
            *("serve", "--model", str(self.model)),
            *("--nodes", str(self.count), "--node-rank", str(node), "--rendezvous", self.rendezvous),
            *("--ranks", str(self.ranks), "--parallel-threads-per-rank", "1", "--host", self.host(node)),
            *("--port", "0", "--metrics-port", "0", "--log-format", "json"),
            *("--scheduler-kv-blocks", "256", "--resilience-standby", "0"),  # so that children are ranks
            *(*self._network(node), *self.options, *options),
        )
        started = Node(await self._process(node, line))
        started._reading = asyncio.create_task(started.read())
        started._reading.add_done_callback(lambda _: started._changed.set())
        self.started.append(started)
        return started

    async def _process(self, node: int, line: Sequence[str]) -> asyncio.subprocess.Process | ForkedProcess:
        limit = 1 << 20
        if self.forked and CAN_FORK and not self.gpus:
            host = "" if self.hosts is None else self.hosts.names[node]
            return await fork("tests.support.cluster.forked_node", (host, *line), limit)
        return await asyncio.create_subprocess_exec(
            *(*self.prefix(node), sys.executable, "-m", "ep_server", *line),
            stderr=asyncio.subprocess.PIPE,
            limit=limit,
        )

    def prefix(self, node: int) -> tuple[str, ...]:
        """In front of a command that shall run where this node does."""
        gpus = ("env", f"CUDA_VISIBLE_DEVICES={self.gpus[node]}") if self.gpus else ()
        return gpus if self.hosts is None else (*gpus, "ip", "netns", "exec", self.hosts.names[node])

    async def close(self) -> None:
        """Kills what still runs."""
        for node in self.started:
            if node.inner.returncode is None:
                with suppress(ProcessLookupError):
                    node.inner.kill()
            await node.end()

    def _network(self, node: int) -> tuple[str, ...]:
        if self.hosts is None:
            return ("--fabric-address", "127.0.0.1")
        return ("--fabric-domain", DEVICE)


@asynccontextmanager
async def nodes(**values: Any) -> AsyncIterator[Nodes]:
    """values: fields of Nodes. None is started."""
    made = Nodes(**values)
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def serving(**values: Any) -> AsyncIterator[list[Node]]:
    """All nodes, when all serve; in the order of their numbers."""
    async with nodes(**values) as made:
        everyone = [await made.start(node) for node in range(made.count)]
        for node in everyone:
            await node.serving()
        yield everyone
