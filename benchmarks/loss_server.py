"""The server processes that benchmarks take ranks and nodes away from, and what their logs and /proc say.

Units: seconds of time.monotonic(), MiB.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import psutil

START_SECONDS = 300.0
IDLE_SECONDS, IDLE_SHARE = 0.2, 0.1
END_SECONDS = 60.0
_SERVING = re.compile(r"serving .* on (\S+:\d+), ")
_MOVED = re.compile(r"request (\S+) continues at rank (\d+)")
_PHASE = re.compile(r"recovery: (\w+) took ([\d.]+) s")


@dataclass(frozen=True, slots=True)
class Held:
    """What an idle server holds. front, ranks: proportional share of memory; ranks: those on standby too.

    shared: files in /dev/shm that are new since the server began.
    """

    front: float
    ranks: float
    processes: int
    descriptors: int  # of the front
    threads: int  # of the front
    shared: int

    def leaks(self, before: Held) -> list[str]:
        """What grew that a loss must give back. Memory is a figure to look at: Python keeps what it freed."""
        counts = ("processes", "descriptors", "threads", "shared")
        grown = {name: getattr(self, name) - getattr(before, name) for name in counts}
        grown["threads"] -= POOL
        return [f"{count} more {name}" for name, count in grown.items() if count > 0]


POOL = min(32, (os.cpu_count() or 1) + 4)  # threads that asyncio.to_thread() starts as they are needed


@dataclass
class Servers:
    """One server of one or more nodes on this machine. log: prefix of a file for each node.

    ranks: of each node. settings: of all nodes. standby: processes of each node.
    """

    nodes: int
    ranks: int
    settings: Mapping[str, object]
    standby: int
    log: Path
    address: str = ""  # of node 0
    processes: list[subprocess.Popen[bytes] | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.processes = [None] * self.nodes
        self._shared = set(Path("/dev/shm").iterdir())
        self._rendezvous = f"127.0.0.1:{_free_port()}"
        for node in range(self.nodes):
            self.log_of(node).unlink(missing_ok=True)

    def log_of(self, node: int) -> Path:
        """Its log, of all its processes."""
        return Path(f"{self.log}.node{node}.log")

    def start(self, node: int) -> None:
        """Starts a node."""
        settings: dict[str, object] = {
            "parallel.ranks": self.ranks,
            "parallel.threads_per_rank": 1,
            "grpc.host": "127.0.0.1",
            "grpc.port": 0,
            "metrics.port": 0,
            "log.level": "debug",
            "log.format": "json",
            "resilience.max_losses": 10_000,
            "resilience.rank_losses": 0,
            "resilience.standby": self.standby,
        }
        if self.nodes > 1:
            settings |= {"cluster.nodes": self.nodes, "cluster.node_rank": node}
            settings |= {"cluster.rendezvous": self._rendezvous, "fabric.address": "127.0.0.1"}
        settings |= self.settings
        options = Path(f"{self.log}.node{node}.toml")
        options.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
        with self.log_of(node).open("ab") as log:
            command = [sys.executable, "-m", "ep_server", "serve", "--config", str(options)]
            self.processes[node] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    async def until_served(self) -> None:
        """Until node 0 has said its address, and its host shadow, if it has one, is locked on GPUs."""
        deadline = time.monotonic() + START_SECONDS
        while not self.address:
            said = (_SERVING.search(message) for _, message in self.messages())
            self.address = next((match[1] for match in said if match), "")
            process = self.processes[0]
            if time.monotonic() > deadline or process is None or process.poll() is not None:
                raise SystemExit(f"the server does not serve:\n{self.log_of(0).read_text()[-4000:]}")
            await asyncio.sleep(0.2)
        if self.settings["parallel.device"] == "cuda" and self.shown(["host shadow: "]):
            while len(self.shown(["locked the host shadow"])) < self.ranks and time.monotonic() < deadline:
                await asyncio.sleep(1)

    def shown(self, words: Sequence[str]) -> list[str]:
        """Lines of node 0 that have one of these words, in the form of people."""
        found = []
        for line in self.log_of(0).read_text(errors="replace").splitlines():
            if any(word in line for word in words):
                try:
                    known = json.loads(line)
                    found.append(f"{known['time']} {known['level']} {known['message']}")
                except (ValueError, KeyError, TypeError):  # of a traceback, say
                    found.append(line)
        return found

    def messages(self) -> Iterator[tuple[float, str]]:
        """Time and text of each line of node 0."""
        offset = time.time() - time.monotonic()
        for line in self.log_of(0).read_text(errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                known = json.loads(line)
                yield datetime.fromisoformat(known["time"]).timestamp() - offset, str(known["message"])

    def moves(self) -> dict[str, list[tuple[float, int]]]:
        """By request: when it got which other rank."""
        found: dict[str, list[tuple[float, int]]] = {}
        for at, message in self.messages():
            if match := _MOVED.fullmatch(message):
                found.setdefault(match[1], []).append((at, int(match[2])))
        return found

    def phases(self) -> dict[str, list[float]]:
        """Seconds of each phase of each recovery."""
        found: dict[str, list[float]] = {}
        for _, message in self.messages():
            if match := _PHASE.fullmatch(message):
                found.setdefault(match[1], []).append(float(match[2]))
        return found

    def inner(self, node: int = 0) -> psutil.Process:
        """The process of a node that callers talk to."""
        process = self.processes[node]
        assert process is not None
        return psutil.Process(process.pid)

    async def standby_idle(self, ranks: set[int]) -> bool:
        """Whether processes on standby are there and compute nothing. ranks: other processes."""
        with suppress(psutil.Error):
            found = [c for node in range(self.nodes) for c in self.ranks_of(node) if c.pid not in ranks]
            before = sum(sum(each.cpu_times()[:2]) for each in found)
            await asyncio.sleep(IDLE_SECONDS)
            used = sum(sum(each.cpu_times()[:2]) for each in found) - before
            # One that a busy machine gives no core uses none either, but does not sleep.
            asleep = all(each.status() == psutil.STATUS_SLEEPING for each in found)
            return len(found) >= self.nodes * self.standby and asleep and used < IDLE_SHARE * IDLE_SECONDS
        return False

    def ranks_of(self, node: int = 0) -> list[psutil.Process]:
        """Processes that are ranks, are to become ranks or are on standby."""
        alive = (c for c in self.inner(node).children() if c.status() != psutil.STATUS_ZOMBIE)
        return [each for each in alive if "ranks.life" in " ".join(each.cmdline())]

    def kill(self, node: int) -> None:
        """Ends the server process of a node, not its ranks: these notice."""
        process = self.processes[node]
        assert process is not None
        process.kill()
        process.wait()

    def held(self) -> Held:
        """Of node 0."""
        front, memory = self.inner(), 0.0
        children = front.children(recursive=True)
        for child in children:
            with suppress(psutil.Error):
                memory += child.memory_full_info().pss
        return Held(
            front.memory_full_info().pss / (1 << 20),
            memory / (1 << 20),
            len(children),
            front.num_fds(),
            front.num_threads(),
            len(set(Path("/dev/shm").iterdir()) - self._shared),
        )

    def stop(self) -> list[str]:
        """Ends all nodes, node 0 last. Returns: what went wrong."""
        wrong = []
        for node, process in reversed([*enumerate(self.processes)]):
            if process is None:
                continue
            process.send_signal(signal.SIGTERM)
            try:
                status = process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            if status:
                wrong.append(f"node {node} ended with status {status}: see {self.log_of(node)}")
        return wrong


def of_streams(streams: int) -> dict[str, object]:
    """Settings of a server on GPUs that so many streams keep busy."""
    return {
        "scheduler.max_running": streams,
        "scheduler.max_step_tokens": 2048,
        "scheduler.max_queue": 4096,
        "grpc.max_streams": 4096,
    }


def of_weights(model: Path) -> dict[str, object]:
    """Settings of a server for a model that may have no weights: made on the device then."""
    if list(model.glob("*.safetensors")):
        return {}
    return {"model.load_format": "dummy", "model.routing": "uniform"}


def given(asked: Iterable[str]) -> dict[str, object]:
    """Settings as the command line has them: SECTION.FIELD=VALUE."""
    return dict(text.split("=", 1) for text in asked)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
