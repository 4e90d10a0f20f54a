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

from google.protobuf.message import DecodeError

from ep_server.config import Config
from ep_server.errors import InternalError, RankLost, StartupError, Unavailable, WrongState
from ep_server.exchange.fabric.settings import SESSION_BITS
from ep_server.orders import PreparePlacement, RankOrder, SwitchChange
from ep_server.ranks.board import Board, LaunchTiming, Timing
from ep_server.ranks.generations import Generations
from ep_server.ranks.hosts import Hosts, OneHost, Rank, ended
from ep_server.ranks.local_ranks import WORKER
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
from ep_server.ranks.scaling import Wanted, scale
from ep_server.ranks.signs import Kind, Sign, cause, kind_of, loss_cause, lost_ranks, start_error
from ep_server.ranks.slots import most_ranks, num_ranks
from ep_server.records import RankReady, Request
from ep_server.v1 import rank_pb2 as pb

log = logging.getLogger(__name__)

MAX_BUFFERED = 256 << 20  # bytes one rank may leave unread
SETTLE_SEVERAL = 0.5  # seconds between the signs of one loss from several hosts
SETTLE_PLAIN = 0.1  # after a sign that nothing else explains


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
        self.num_ranks = most_ranks(config)
        self._first = frozenset(range(num_ranks(config)))
        self._rank_losses = config.resilience.rank_losses
        self._several = config.cluster.nodes > 1
        self._hosts = hosts or OneHost(config, module, outlive=outlive)
        self._answer_seconds = config.exchange.timeout_seconds
        self._timing = timing or LaunchTiming(settle=SETTLE_SEVERAL if self._several else 0.1)
        self._board = Board()
        self._generations: Generations | None = None
        self._introductions: dict[int, pb.Introduction] = {}
        self._started: asyncio.Future[None] | None = None
        self._listener: RankListener | None = None
        self._progress: Callable[[int, str, int, int], None] = lambda *_: None
        self.failed: Sign | None = None  # why start() raised
        self._first_sign = 0.0  # when
        self._settling: asyncio.TimerHandle | None = None  # until the report of a loss
        self._stopping: asyncio.Task[None] | None = None
        self._scaling: asyncio.Task[float] | None = None

    def __repr__(self) -> str:
        return f"RankProcesses({list(self._board.processes.values())!r}, work={self._board.work_number})"

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for _, process in sorted(self._board.processes.items())]

    @property
    def exit_codes(self) -> list[int | None]:
        """By rank: the exit code or minus the signal; None while it runs."""
        return [process.returncode for _, process in sorted(self._board.processes.items())]

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
            await self._hosts.spawn(callbacks, self._spawned)
            await self._all_ready()
            if (replacing := self._hosts.replacing) is not None:
                timing = self._timing
                seconds = Timing(
                    timing.start_stall, timing.grace, timing.kill, self._answer_seconds + timing.kill
                )
                self._generations = Generations(
                    self._board, replacing, callbacks, listener, seconds, self._rank_losses
                )
                replacing.prepare()
        except BaseException:
            await self.stop()
            raise
        return [self._board.ready[rank] for rank in sorted(self._first)]

    async def restart(self, awaited: Callable[[int], Collection[int]]) -> Restarted:
        """As Ranks.restart: goes on without the lost ranks or replaces them. Raises: StartupError."""
        if self._stopping is not None:
            raise StartupError("the ranks were stopped")
        if self._generations is None:
            raise StartupError("these ranks do not outlive a loss")
        return await self._generations.restart(awaited)

    async def scale(self, count: int, hold_out: frozenset[int]) -> float:
        """As Ranks.scale. It goes on if the caller leaves."""
        if self._generations is None or self._stopping is not None:
            allowed = "of one node, with resilience.on_rank_loss = recover and no float32 on GPUs"
            raise WrongState(f"only ranks {allowed} can change")
        if self._scaling is not None and not self._scaling.done():
            raise WrongState("another call of Scale runs")
        made = scale(self._generations, count, hold_out, self.num_ranks, self._board.ready.values())
        self._scaling = asyncio.get_running_loop().create_task(made)
        try:
            return await asyncio.shield(self._scaling)
        except asyncio.CancelledError:
            if self._scaling.cancelled():
                raise Unavailable("the ranks stopped meanwhile") from None
            raise

    @property
    def wanted(self) -> Wanted | None:
        """Which ranks shall serve; None before they have started, or if these ranks cannot change."""
        return None if self._generations is None else Wanted.of(self._generations)

    def want(self, wanted: Wanted) -> None:
        """Has them become so, as soon as they can."""
        if self._generations is not None and wanted != self.wanted:
            wanted.want(self._generations)

    def submit(self, rank: int, request: Request) -> None:
        """As Ranks.submit: the request goes to its rank, its work number to all."""
        self._board.work_number += 1
        doorbell = pb.ToRank(doorbell=pb.Doorbell(work_number=self._board.work_number)).SerializeToString()
        add = add_message(request, self._board.work_number).SerializeToString()
        for process in self._serving():
            process.send(add if process.rank == rank else doorbell)
            if process.buffered > MAX_BUFFERED:
                self._note(Kind.OWN_ERROR, process.rank, f"left {process.buffered} bytes unread")

    def cancel(self, rank: int, number: int) -> None:
        """As Ranks.cancel."""
        if rank in self._board.processes:
            cancel = pb.ToRank(cancel=pb.Cancel(number=number))
            self._board.processes[rank].send(cancel.SerializeToString())

    def watch_cache(self, *, on: bool) -> None:
        """As Ranks.watch_cache."""
        self._board.watching = on
        self._send_all(pb.ToRank(watch_cache=pb.WatchCache(on=on)))

    def use_weights(self, path: str, version: int, files: str = "") -> None:
        """As Ranks.use_weights."""
        self._hosts.use_weights(path, version, files)
        if self._generations is not None:
            self._generations.arrivals.weights_changed()

    @property
    def weights(self) -> tuple[str, int, str]:
        """What use_weights() would take for those in force."""
        return self._hosts.weights

    def forget_lost(self) -> None:
        """As Ranks.forget_lost."""
        if self._generations is not None:
            self._generations.forget_lost()

    def order(self, order: RankOrder, number: int) -> None:
        """As Ranks.order. A switch has a work number, as it wakes parked ranks."""
        if isinstance(order, PreparePlacement) and self._generations is not None:
            self._generations.prepares(order.change, order.placement)
        if isinstance(order, SwitchChange):
            if self._generations is not None:
                self._generations.switches(order.change)
            self._board.work_number += 1
            self._send_all(order_message(order, number, self._board.work_number))
        else:
            self._send_all(order_message(order, number))

    @property
    def live(self) -> frozenset[int]:
        """Ranks that serve: they get requests and orders."""
        return self._first if self._generations is None else self._generations.live

    def _serving(self) -> list[Rank]:
        processes, live = self._board.processes, self.live
        return [processes[rank] for rank in sorted(processes) if rank in live]

    def _spawned(self, process: Rank) -> None:
        self._board.processes[process.rank] = process

    def _send_all(self, message: pb.ToRank) -> None:
        payload = message.SerializeToString()
        for process in self._serving():
            process.send(payload)

    async def stop(self) -> None:
        """As Ranks.stop: sends Shutdown, then SIGTERM, then SIGKILL; returns when every process is reaped."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _all_ready(self) -> None:
        assert self._started is not None
        loop, stall = asyncio.get_running_loop(), self._timing.start_stall
        began = loop.time()
        while not self._started.done():
            left = max([began, *self._board.told.values()]) + stall - loop.time()
            if left <= 0:
                silent = sorted(set(self._board.processes) - set(self._board.ready))
                raise StartupError(f"ranks {silent} reported nothing for {stall:g} s while starting")
            await asyncio.wait((self._started,), timeout=left)
        await self._started

    async def _stop(self) -> None:
        if self._scaling is not None:
            self._scaling.cancel()
            await asyncio.wait((self._scaling,))
        if self._generations is not None:
            await self._generations.stop()
        started = self._started is not None and self._started.done() and not self._board.signs
        if started:
            self._send_all(pb.ToRank(shutdown=pb.Shutdown()))
            await ended(list(self._board.processes.values()), self._timing.grace)
        for number, seconds in ((signal.SIGTERM, self._timing.term), (signal.SIGKILL, self._timing.kill)):
            for process in list(self._board.processes.values()):
                process.signal(number)
            await ended(list(self._board.processes.values()), seconds)
        for process in list(self._board.processes.values()):
            if not process.exited.is_set():
                log.error("rank %d got SIGKILL but its process has not ended", process.rank)
            process.close()
        await ended(self._board.dying, self._timing.kill)
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
        self._board.heard.set()
        if kind == "tokens":
            listener.on_tokens(rank, events_of(message.tokens))
        elif kind == "prompt_logprobs":
            listener.on_prompt_logprobs(rank, prompt_logprobs_of(message.prompt_logprobs))
        elif kind == "statistics":
            listener.on_statistics(statistics_of(message.statistics))
        elif kind in ("begun", "freed", "request_failed"):
            _report_requests(listener, rank, message)
        elif kind == "running":
            listener.on_running(rank, message.running)
        elif kind == "kv_events":
            listener.on_kv_events(kv_events_of(rank, message.kv_events))
        elif kind == "order_done":
            done = order_done_of(message.order_done)
            if self._generations is None or not self._generations.orders.on_done(rank, done):
                listener.on_order_done(rank, done)
        elif kind in ("fatal", "interrupted"):
            fatal = message.fatal if kind == "fatal" else message.interrupted
            peer = fatal.peer if fatal.HasField("peer") else None
            self._sign(Sign(kind_of(fatal.error_class), rank, error_of(fatal), peer))
        else:
            self._on_starting(rank, kind, message)

    def _on_starting(self, rank: int, kind: str | None, message: pb.FromRank) -> None:
        self._board.told[rank] = asyncio.get_running_loop().time()
        if kind == "progress":
            self._progress(rank, message.progress.stage, message.progress.done, message.progress.total)
        elif kind == "introduction":
            self._introductions[rank] = message.introduction
            if len(self._introductions) == len(self._first):
                self._connect()
        elif kind == "regrouped" and self._generations is not None:
            self._generations.regrouping.on_regrouped(rank, message.regrouped)
        elif kind == "ready":
            self._board.ready[rank] = ready_of(message.ready)
            if self._first <= set(self._board.ready) and self._started and not self._started.done():
                self._started.set_result(None)
        else:
            self._note(Kind.OWN_ERROR, rank, "sent an empty message")

    def _connect(self) -> None:
        """Sends every rank the addresses of all ranks."""
        everyone = [self._introductions[rank] for rank in sorted(self._first)]
        connect = pb.Connect(ranks=everyone, session=secrets.randbits(SESSION_BITS))
        self._send_all(pb.ToRank(connect=connect))

    def _on_closed(self, rank: int, reason: str) -> None:
        self._note(Kind.CLOSED, rank, reason)

    def _on_exit(self, rank: int, code: int) -> None:
        self._sign(Sign(Kind.EXIT, rank, RankLost(exit_reason(code)), killed=code < 0))

    def _on_host_lost(self, rank: int, reason: str) -> None:
        self._note(Kind.HOST, rank, reason)

    def _note(self, kind: Kind, rank: int, reason: str) -> None:
        self._sign(Sign(kind, rank, RankLost(reason)))

    def _sign(self, sign: Sign) -> None:
        self._board.heard.set()
        if self._stopping is not None:
            return
        if self._generations is not None:
            if self._generations.takes(sign):
                return
            if not self._generations.over:  # a rank that waited for a lost one waits for Regroup now
                if sign.kind not in (Kind.PEER, Kind.ABORT):
                    self._board.signs.append(sign)
                return
        loop = asyncio.get_running_loop()
        if not self._board.signs:
            self._first_sign = loop.time()
            self._settling = loop.call_later(self._timing.settle, self._report_loss)
        self._board.signs.append(sign)
        soon = loop.time() + SETTLE_PLAIN
        if sign.plain and self._settling is not None and self._settling.when() > soon:
            self._settling.cancel()
            self._settling = loop.call_at(soon, self._report_loss)

    def _report_loss(self) -> None:
        started = self._started is not None and self._started.done()
        one_by_one = started and self._hosts.replacing is not None
        sign = cause(self._board.signs)
        lost = lost_ranks(self._board.signs) if one_by_one else frozenset({sign.rank})  # the others follow it
        for process in list(self._board.processes.values()):
            if process.rank in lost or not one_by_one:
                process.signal(signal.SIGKILL)
        if self._stopping is not None:
            return
        assert self._started is not None and self._listener is not None
        if not self._started.done():
            self.failed = sign
            self._started.set_exception(start_error(sign, several=self._several))
        elif self._generations is None or self._generations.over:
            seconds = asyncio.get_running_loop().time() - self._first_sign
            self._count(self._board.signs, lost)
            self._listener.on_lost(sign.rank, str(sign.error), seconds)

    def _count(self, signs: Sequence[Sign], lost: frozenset[int]) -> None:
        assert self._listener is not None
        if self._generations is not None:
            self._generations.count(signs, lost)
        else:
            for rank in sorted(lost):
                self._listener.on_rank_lost(rank, loss_cause(signs, rank))


def _report_requests(listener: RankListener, rank: int, message: pb.FromRank) -> None:
    kind = message.WhichOneof("kind")
    if kind == "begun":
        begun = message.begun
        listener.on_begun(rank, begun.numbers, begun.adding, begun.copied)
    elif kind == "freed":
        listener.on_freed(rank, message.freed.number)
    else:
        failed = message.request_failed
        listener.on_request_failed(rank, failed.number, request_error_of(rank, failed))
