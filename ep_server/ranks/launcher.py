"""The ranks of a group as real processes: starts them, carries messages, notices their exit, stops them.

Satisfies ranks.protocol.Ranks; used in one event loop. A group lives and dies as one: the first sign of a
lost rank stops all of them. One loss has many signs: the rank's last message, its exit code, closed
channels, and its peers' errors; `cause` picks the rank that was lost first. Units: seconds.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from google.protobuf.message import DecodeError

from ep_server.config import Config
from ep_server.errors import ConfigError, EpServerError, InternalError, RankLost, StartupError
from ep_server.ranks.group import num_ranks
from ep_server.ranks.hosts import WORKER, Hosts, OneHost, Rank, ended
from ep_server.ranks.messages import (
    add_message,
    error_of,
    events_of,
    kv_events_of,
    order_done_of,
    order_message,
    prompt_logprobs_of,
    ready_of,
    request_error_of,
    statistics_of,
)
from ep_server.ranks.process import RankCallbacks, exit_reason
from ep_server.ranks.protocol import RankListener
from ep_server.records import RankOrder, RankReady, Request
from ep_server.v1 import rank_pb2 as pb


class Kind(IntEnum):
    """Kinds of signs, the most telling first: a loss of one kind causes those after it."""

    OWN_ERROR = 0
    EXIT = 1  # without a message
    HOST = 2  # host lost
    PEER = 3  # waiting for a peer failed
    ABORT = 4  # a peer aborted the group
    CLOSED = 5  # channel closed


_ECHOES = {
    "PeerTimeout": Kind.PEER,
    "PeerLost": Kind.PEER,
    "ProtocolViolation": Kind.PEER,
    "GroupAborted": Kind.ABORT,
}


def kind_of(error_class: str) -> Kind:
    """The kind of sign of an error that a rank ended with."""
    return _ECHOES.get(error_class, Kind.OWN_ERROR)


@dataclass(frozen=True, slots=True)
class Sign:
    """Evidence that a rank is lost. peer: the rank it waited for in vain, if it named one."""

    kind: Kind
    rank: int
    error: EpServerError
    peer: int | None = None


def cause(signs: Sequence[Sign]) -> Sign:
    """The most telling of at least one sign. A rank's message explains its exit, whichever arrives first.

    Where ranks waited in vain, the culprit is the rank at the end of the chain of waits, not one that waited.
    """
    spoke = {sign.rank for sign in signs if sign.kind not in (Kind.EXIT, Kind.CLOSED)}
    unexplained = [sign for sign in signs if sign.kind is not Kind.EXIT or sign.rank not in spoke]
    best = min(unexplained, key=lambda sign: sign.kind)
    waits = {sign.rank: sign.peer for sign in signs if sign.kind is Kind.PEER and sign.peer is not None}
    if best.kind is not Kind.PEER or best.rank not in waits:
        return best
    end = _end_of(waits, best.rank)
    reported = next((sign for sign in unexplained if sign.kind is Kind.PEER and sign.peer == end), best)
    return replace(reported, rank=end)


def _end_of(waits: Mapping[int, int], rank: int) -> int:
    """The rank that others wait for and that waits for none; in a ring of waits, the last one visited."""
    visited = {rank}
    while (peer := waits.get(rank)) is not None and peer not in visited:
        visited.add(peer)
        rank = peer
    return rank


def start_error(sign: Sign, *, several: bool) -> StartupError:
    """The error that start() raises for a sign. several: whether the group has several hosts.

    Names the rank, except for a ConfigError on one host, where all ranks read the same configuration.
    """
    if isinstance(sign.error, ConfigError):
        return StartupError(f"rank {sign.rank}: {sign.error}") if several else sign.error
    kind = type(sign.error) if isinstance(sign.error, StartupError) else StartupError
    return kind(f"rank {sign.rank}: {sign.error}")


log = logging.getLogger(__name__)

MAX_BUFFERED = 256 << 20  # bytes one rank may leave unread
SETTLE_SEVERAL = 0.5  # seconds between the signs of one loss from several hosts

SESSION_BITS = 17  # of a group over several hosts: as many as a greeting of its ranks carries


@dataclass(frozen=True, slots=True)
class LaunchTiming:
    """Durations in seconds.

    start_stall: longest silence of a loading rank. settle: from the first sign of a loss to its report,
    to collect the signs that name the cause. grace: for the last step at stop(); then SIGTERM, after
    `term` SIGKILL, and after `kill` the process is left to the kernel."""

    start_stall: float = 300.0
    settle: float = 0.1
    grace: float = 5.0
    term: float = 1.0
    kill: float = 10.0


class RankProcesses:
    """A group of ranks.

    Args:
        hosts: where they run; None = on this host.
        module: what each process runs; any module that speaks rank.proto.
    """

    def __init__(
        self,
        config: Config,
        hosts: Hosts | None = None,
        *,
        module: str = WORKER,
        timing: LaunchTiming | None = None,
    ) -> None:
        self.num_ranks = num_ranks(config)
        self._several = config.cluster.nodes > 1
        self._hosts = hosts or OneHost(config, module)
        self._timing = timing or LaunchTiming(settle=SETTLE_SEVERAL if self._several else 0.1)
        self._processes: list[Rank] = []
        self._introductions: dict[int, pb.Introduction] = {}
        self._ready: dict[int, RankReady] = {}
        self._started: asyncio.Future[None] | None = None
        self._listener: RankListener | None = None
        self._progress: Callable[[int, str, int, int], None] = lambda *_: None
        self._last_sign_of_life = 0.0
        self._work_number = 0
        self._signs: list[Sign] = []
        self._stopping: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"RankProcesses({self._processes!r}, work={self._work_number})"

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self._processes]

    @property
    def exit_codes(self) -> list[int | None]:
        """By rank: the exit code or minus the signal; None while it runs."""
        return [process.returncode for process in self._processes]

    async def start(
        self, listener: RankListener, progress: Callable[[int, str, int, int], None]
    ) -> list[RankReady]:
        """As Ranks.start. Call it once, from a thread that outlives the ranks."""
        if self._started is not None:
            raise InternalError("start() was called twice")
        loop = asyncio.get_running_loop()
        self._started = loop.create_future()
        self._listener, self._progress = listener, progress
        callbacks = RankCallbacks(self._on_frame, self._on_closed, self._on_exit, self._on_host_lost)
        try:
            await self._hosts.spawn(callbacks, self._processes.append)
            await self._all_ready()
        except BaseException:
            await self.stop()
            raise
        return [self._ready[rank] for rank in range(self.num_ranks)]

    async def restart(self) -> list[RankReady]:
        """Not of one group: restarting.RestartingRanks makes the next one. Raises: StartupError."""
        raise StartupError("this group of ranks cannot be restarted")

    def submit(self, rank: int, request: Request) -> None:
        """As Ranks.submit: the request goes to its rank, its work number to all."""
        self._work_number += 1
        doorbell = pb.ToRank(doorbell=pb.Doorbell(work_number=self._work_number)).SerializeToString()
        add = add_message(request, self._work_number).SerializeToString()
        for process in self._processes:
            process.send(add if process.rank == rank else doorbell)
            if process.buffered > MAX_BUFFERED:
                self._note(Kind.OWN_ERROR, process.rank, f"left {process.buffered} bytes unread")

    def cancel(self, rank: int, number: int) -> None:
        """As Ranks.cancel."""
        self._processes[rank].send(pb.ToRank(cancel=pb.Cancel(number=number)).SerializeToString())

    def watch_cache(self, *, on: bool) -> None:
        """As Ranks.watch_cache."""
        self._send_all(pb.ToRank(watch_cache=pb.WatchCache(on=on)))

    def order(self, order: RankOrder, number: int) -> None:
        """As Ranks.order."""
        self._send_all(order_message(order, number))

    def _send_all(self, message: pb.ToRank) -> None:
        payload = message.SerializeToString()
        for process in self._processes:
            process.send(payload)

    async def stop(self) -> None:
        """As Ranks.stop: sends Shutdown, then SIGTERM, then SIGKILL; returns when every process is reaped."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _all_ready(self) -> None:
        assert self._started is not None
        loop, stall = asyncio.get_running_loop(), self._timing.start_stall
        self._last_sign_of_life = loop.time()
        while not self._started.done():
            left = self._last_sign_of_life + stall - loop.time()
            if left <= 0:
                silent = [p.rank for p in self._processes if p.rank not in self._ready]
                raise StartupError(f"ranks {silent} reported nothing for {stall:g} s while starting")
            await asyncio.wait((self._started,), timeout=left)
        await self._started

    async def _stop(self) -> None:
        started = self._started is not None and self._started.done() and not self._signs
        if started:
            self._send_all(pb.ToRank(shutdown=pb.Shutdown()))
            await ended(self._processes, self._timing.grace)
        for number, seconds in ((signal.SIGTERM, self._timing.term), (signal.SIGKILL, self._timing.kill)):
            for process in self._processes:
                process.signal(number)
            await ended(self._processes, seconds)
        for process in self._processes:
            if not process.exited.is_set():
                log.error("rank %d got SIGKILL but its process has not ended", process.rank)
            process.close()
        if self._started is not None and not self._started.done():
            self._started.cancel()

    def _on_frame(self, rank: int, payload: bytes) -> None:
        try:
            message = pb.FromRank.FromString(payload)
        except DecodeError as error:
            self._note(Kind.OWN_ERROR, rank, f"sent a malformed message: {error}")
            return
        kind, listener = message.WhichOneof("kind"), self._listener
        assert listener is not None
        if kind == "tokens":
            listener.on_tokens(rank, events_of(message.tokens))
        elif kind == "prompt_logprobs":
            listener.on_prompt_logprobs(rank, prompt_logprobs_of(message.prompt_logprobs))
        elif kind == "freed":
            listener.on_freed(rank, message.freed.number)
        elif kind == "statistics":
            listener.on_statistics(statistics_of(message.statistics))
        elif kind == "request_failed":
            failed = message.request_failed
            listener.on_request_failed(rank, failed.number, request_error_of(rank, failed))
        elif kind == "running":
            listener.on_running(rank, message.running)
        elif kind == "kv_events":
            listener.on_kv_events(kv_events_of(rank, message.kv_events))
        elif kind == "order_done":
            listener.on_order_done(rank, order_done_of(message.order_done))
        elif kind == "fatal":
            fatal = message.fatal
            peer = fatal.peer if fatal.HasField("peer") else None
            self._sign(Sign(kind_of(fatal.error_class), rank, error_of(fatal), peer))
        else:
            self._on_starting(rank, kind, message)

    def _on_starting(self, rank: int, kind: str | None, message: pb.FromRank) -> None:
        self._last_sign_of_life = asyncio.get_running_loop().time()
        if kind == "progress":
            self._progress(rank, message.progress.stage, message.progress.done, message.progress.total)
        elif kind == "introduction":
            self._introductions[rank] = message.introduction
            if len(self._introductions) == self.num_ranks:
                self._connect()
        elif kind == "ready":
            self._ready[rank] = ready_of(message.ready)
            if len(self._ready) == self.num_ranks and self._started and not self._started.done():
                self._started.set_result(None)
        else:
            self._note(Kind.OWN_ERROR, rank, "sent an empty message")

    def _connect(self) -> None:
        """Sends every rank the addresses of all ranks."""
        everyone = [self._introductions[rank] for rank in range(self.num_ranks)]
        connect = pb.Connect(ranks=everyone, session=secrets.randbits(SESSION_BITS))
        self._send_all(pb.ToRank(connect=connect))

    def _on_closed(self, rank: int, reason: str) -> None:
        self._note(Kind.CLOSED, rank, reason)

    def _on_exit(self, rank: int, code: int) -> None:
        self._note(Kind.EXIT, rank, exit_reason(code))

    def _on_host_lost(self, rank: int, reason: str) -> None:
        self._note(Kind.HOST, rank, reason)

    def _note(self, kind: Kind, rank: int, reason: str) -> None:
        self._sign(Sign(kind, rank, RankLost(reason)))

    def _sign(self, sign: Sign) -> None:
        if self._stopping is not None:
            return
        if not self._signs:
            asyncio.get_running_loop().call_later(self._timing.settle, self._report_loss)
        self._signs.append(sign)

    def _report_loss(self) -> None:
        for process in self._processes:
            process.signal(signal.SIGKILL)
        if self._stopping is not None:
            return
        sign = cause(self._signs)
        assert self._started is not None and self._listener is not None
        if not self._started.done():
            self._started.set_exception(start_error(sign, several=self._several))
        else:
            self._listener.on_lost(sign.rank, str(sign.error))
