"""The ranks of a group as real processes: starts them, carries messages, notices their exit, stops them.

Satisfies ranks.protocol.Ranks; used in one event loop. A group lives and dies as one, unless its ranks
outlive a loss: then restart() replaces the lost ranks alone. One loss has many signs: the rank's last
message, its exit code, closed channels, and its peers' errors; `cause` picks the rank that was lost first.
Units: seconds.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from ep_server.config import Config
from ep_server.errors import InternalError, RankLost, StartupError
from ep_server.orders import RankOrder, SwitchChange
from ep_server.ranks.generations import Regrouping, group_state
from ep_server.ranks.hosts import WORKER, Hosts, OneHost, Rank, Replacing, ended
from ep_server.ranks.messages import (
    add_message,
    error_of,
    events_of,
    kv_events_of,
    prompt_logprobs_of,
    ready_of,
    request_error_of,
    statistics_of,
)
from ep_server.ranks.order_messages import order_done_of, order_message
from ep_server.ranks.process import RankCallbacks, exit_reason
from ep_server.ranks.protocol import RankListener, Restarted
from ep_server.ranks.signs import Kind, Sign, cause, kind_of, loss_cause, lost_ranks, start_error
from ep_server.ranks.slots import num_ranks
from ep_server.records import RankReady, Request
from ep_server.v1 import rank_pb2 as pb

log = logging.getLogger(__name__)

MAX_BUFFERED = 256 << 20  # bytes one rank may leave unread
SETTLE_SEVERAL = 0.5  # seconds between the signs of one loss from several hosts
SETTLE_PLAIN = 0.1  # after a sign that nothing else explains

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
        outlive: ranks outlive the loss of others where they can, and wait for restart().
    """

    def __init__(
        self,
        config: Config,
        hosts: Hosts | None = None,
        *,
        module: str = WORKER,
        timing: LaunchTiming | None = None,
        outlive: bool = False,
    ) -> None:
        self.num_ranks = num_ranks(config)
        self._several = config.cluster.nodes > 1
        self._hosts = hosts or OneHost(config, module, outlive=outlive)
        self._answer_seconds = config.exchange.timeout_seconds
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
        self._counted: set[int] = set()  # ranks whose loss is reported, until they are replaced
        self._first_sign = 0.0  # when
        self._settling: asyncio.TimerHandle | None = None  # until the report of a loss
        self._closed: set[int] = set()  # ranks whose channel has been read to its end
        self._regrouping = Regrouping(0, over=True)
        self._heard = asyncio.Event()  # from any rank
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
            if self._hosts.replacing is not None:
                await self._hosts.replacing.prepare()
                listener.on_group(group_state(0, range(self.num_ranks), self._hosts.replacing.plan))
        except BaseException:
            await self.stop()
            raise
        return [self._ready[rank] for rank in range(self.num_ranks)]

    async def restart(self, awaited: Callable[[int], Collection[int]]) -> Restarted:
        """As Ranks.restart: replaces the lost ranks alone. Raises: StartupError; the group must end then."""
        replacing = self._hosts.replacing
        if replacing is None or self._stopping is not None:
            raise StartupError("these ranks do not outlive a loss")
        self._regrouping = Regrouping(self._regrouping.generation + 1)
        lost: set[int] = set()
        while self._signs:  # a rank may be lost while others are replaced
            signs, self._signs = self._signs, []
            fresh = lost_ranks(signs)
            lost |= fresh
            self._count(signs, fresh)
            self._regrouping.replaced += len(fresh)
            if len(lost) == self.num_ranks or self._regrouping.replaced > self.num_ranks:
                raise StartupError("too many ranks are lost")
            await self._replace(fresh, replacing)
        for process in self._processes:
            kept = [] if process.rank in lost else awaited(process.rank)
            order = pb.Regroup(
                generation=self._regrouping.generation, work_number=self._work_number, kept=kept
            )
            process.send(pb.ToRank(regroup=order).SerializeToString())
        seconds = self._answer_seconds + self._timing.kill
        await self._until(lambda: len(self._regrouping.done) == self.num_ranks, seconds)
        if self._signs:
            raise StartupError(f"rank {self._signs[0].rank}: {self._signs[0].error}")
        self._regrouping.over = True
        await replacing.prepare()
        everyone = range(self.num_ranks)
        return Restarted([self._ready[rank] for rank in everyone], frozenset(everyone) - lost)

    async def _replace(self, lost: frozenset[int], replacing: Replacing) -> None:
        """Ends processes, starts others in their place, and returns once these are ready or more are lost."""
        old = [self._processes[rank] for rank in sorted(lost)]
        self._regrouping.leaving = set(lost)
        for process in old:
            process.signal(signal.SIGKILL)
        await self._until(
            lambda: all(process.exited.is_set() and process.rank in self._closed for process in old),
            self._timing.kill,
        )
        for process in old:
            if not process.exited.is_set():
                raise StartupError(f"the process of rank {process.rank} does not end")
            replacing.report_lost(process.rank)
        self._regrouping.leaving.clear()
        self._closed -= lost
        callbacks = RankCallbacks(self._on_frame, self._on_closed, self._on_exit, self._on_host_lost)
        for process in old:
            process.close()
            self._ready.pop(process.rank, None)
            self._processes[process.rank] = await replacing.replace(process.rank, callbacks)
        self._counted -= lost
        await self._until(
            lambda: len(self._ready) == self.num_ranks or bool(self._signs), self._timing.start_stall
        )

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Raises: StartupError after so many seconds without a message of any rank."""
        while not condition():
            self._heard.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._heard.wait()
            except TimeoutError:
                raise StartupError(
                    f"ranks reported nothing for {seconds:g} s while one is replaced"
                ) from None

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

    def use_weights(self, path: str, version: int) -> None:
        """As Ranks.use_weights."""
        self._hosts.use_weights(path, version)

    def order(self, order: RankOrder, number: int) -> None:
        """As Ranks.order. A switch has a work number, as it wakes parked ranks."""
        if isinstance(order, SwitchChange):
            self._work_number += 1
            self._send_all(order_message(order, number, self._work_number))
        else:
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
        if self._hosts.replacing is not None:
            await self._hosts.replacing.close()
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
        self._heard.set()
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
        elif kind == "regrouped":
            self._regrouping.done.add(rank)
        elif kind in ("fatal", "interrupted"):
            fatal = message.fatal if kind == "fatal" else message.interrupted
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
        self._closed.add(rank)
        self._note(Kind.CLOSED, rank, reason)

    def _on_exit(self, rank: int, code: int) -> None:
        self._sign(Sign(Kind.EXIT, rank, RankLost(exit_reason(code)), killed=code < 0))

    def _on_host_lost(self, rank: int, reason: str) -> None:
        self._note(Kind.HOST, rank, reason)

    def _note(self, kind: Kind, rank: int, reason: str) -> None:
        self._sign(Sign(kind, rank, RankLost(reason)))

    def _sign(self, sign: Sign) -> None:
        self._heard.set()
        if self._stopping is not None:
            return
        if not self._regrouping.over:
            expected = sign.rank in self._regrouping.leaving or sign.kind in (Kind.PEER, Kind.ABORT)
            if not expected:  # a rank that waited for a lost one waits for Regroup now
                self._signs.append(sign)
            return
        loop = asyncio.get_running_loop()
        if not self._signs:
            self._first_sign = loop.time()
            self._settling = loop.call_later(self._timing.settle, self._report_loss)
        self._signs.append(sign)
        soon = loop.time() + SETTLE_PLAIN
        if sign.plain and self._settling is not None and self._settling.when() > soon:
            self._settling.cancel()
            self._settling = loop.call_at(soon, self._report_loss)

    def _report_loss(self) -> None:
        started = self._started is not None and self._started.done()
        one_by_one = started and self._hosts.replacing is not None
        sign = cause(self._signs)
        lost = lost_ranks(self._signs) if one_by_one else frozenset({sign.rank})  # the others follow it
        for process in self._processes:
            if process.rank in lost or not one_by_one:
                process.signal(signal.SIGKILL)
        if self._stopping is not None:
            return
        assert self._started is not None and self._listener is not None
        if not self._started.done():
            self._started.set_exception(start_error(sign, several=self._several))
        elif self._regrouping.over:
            seconds = asyncio.get_running_loop().time() - self._first_sign
            self._count(self._signs, lost)
            self._listener.on_lost(sign.rank, str(sign.error), seconds)

    def _count(self, signs: Sequence[Sign], lost: frozenset[int]) -> None:
        """Reports each lost rank once."""
        assert self._listener is not None
        for rank in sorted(lost - self._counted):
            self._listener.on_rank_lost(rank, loss_cause(signs, rank))
        self._counted |= lost
