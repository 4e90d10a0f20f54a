"""FakeRanks: a group of ranks in this process: the real scheduler, made-up tokens. No model, no clock.

For tests and for trying the gRPC front without a checkpoint. Tokens depend on the request alone, so they are
known beforehand. A test may hold the steps, run them one by one, kill a rank or fail a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Final

from ep_server.errors import InternalError, StartupError, WrongState
from ep_server.orders import (
    DropChange,
    FlushCache,
    OrderDone,
    PrepareWeights,
    RankOrder,
    StartProfile,
    SwitchChange,
)
from ep_server.ranks.protocol import RankListener, Restarted
from ep_server.records import (
    KvEventBatch,
    LossCause,
    PromptLogprobs,
    RankReady,
    RankStatistics,
    Request,
    SampledToken,
    SeqSlice,
    StepBatch,
    TokenEvent,
)
from ep_server.scheduler.batch import SchedulerLimits
from ep_server.scheduler.cache_reporter import CacheReporter
from ep_server.scheduler.rank_scheduler import RankScheduler

NextToken = Callable[[Request, int], int]  # (request, index in its output) -> token id

LIMITS: Final = SchedulerLimits(
    max_running=64,
    max_step_tokens=4096,
    block_size=16,
    kv_blocks=4096,
    prefix_cache=True,
    max_context=65536,
)
VOCABULARY: Final = 256
LATENCY_BUCKET: Final = 14  # every made-up duration lies in [2^14, 2^15) ns
LATENCY_NS: Final = 20_000


def counting(request: Request, index: int) -> int:
    """The default: goes on counting from the last prompt token, modulo 256."""
    return (request.prompt_ids[-1] + 1 + index) % VOCABULARY


def scripted(*tokens: int) -> NextToken:
    """The same output for every request, over and over."""
    return lambda _request, index: tokens[index % len(tokens)]


class FakeRanks:
    """Satisfies ranks.protocol.Ranks. All of it runs in the event loop that called start()."""

    def __init__(
        self, num_ranks: int = 1, *, limits: SchedulerLimits = LIMITS, next_token: NextToken = counting
    ) -> None:
        self.num_ranks = num_ranks
        self.requests: dict[int, Request] = {}  # by number, every request ever submitted
        self.cancelled: list[int] = []  # numbers, in the order of cancel()
        self.profile = ""  # name of the last one; nothing is written
        self.weights = "", 0  # of ranks that start from now on
        self.copy_rate = 1e9  # of new weights, bytes per second
        self.refusal = ""  # of rank 0, to prepare a change
        self.stopped = False
        self.start_gate: asyncio.Event | None = None  # start() waits for it
        self.start_error: StartupError | None = None  # start() raises it
        self._limits = limits
        self._next_token = next_token
        self._begin()
        self._held = False
        self._turn: asyncio.Handle | None = None
        self._listener: RankListener | None = None

    def _begin(self) -> None:
        self._schedulers = [RankScheduler(self._limits, self.weights[1]) for _ in range(self.num_ranks)]
        self._caches = [
            CacheReporter(rank, scheduler, self._report_cache, lambda: 0.0)
            for rank, scheduler in enumerate(self._schedulers)
        ]
        self._orders: list[tuple[RankOrder, int]] = []
        self._preparing: PrepareWeights | None = None
        self._drawn: dict[int, int] = {}
        self._begun = set[int]()
        self._cancels: list[tuple[int, int]] = []
        self._steps = [0] * self.num_ranks
        self._tokens = [0] * self.num_ranks
        self._dead = False

    def __repr__(self) -> str:
        return f"FakeRanks({self._schedulers!r})"

    async def scale(self, count: int, hold_out: frozenset[int]) -> float:
        """Refused: fake ranks do not change."""
        raise WrongState("fake ranks do not change")

    async def start(
        self, listener: RankListener, progress: Callable[[int, str, int, int], None]
    ) -> list[RankReady]:
        """Ready at once, or once `start_gate` is set."""
        self._listener = listener
        for rank in range(self.num_ranks):
            progress(rank, "weights", 0, 1)
        if self.start_gate is not None:
            await self.start_gate.wait()
        if self.start_error is not None:
            raise self.start_error
        for rank in range(self.num_ranks):
            progress(rank, "weights", 1, 1)
        return [self._ready(rank) for rank in range(self.num_ranks)]

    async def restart(self, awaited: Callable[[int], Collection[int]]) -> Restarted:
        """New schedulers, once `start_gate` is set. Raises: `start_error`."""
        if self.start_gate is not None:
            await self.start_gate.wait()
        if self.start_error is not None:
            raise self.start_error
        self._begin()
        self.release()
        return Restarted([self._ready(rank) for rank in range(self.num_ranks)])

    def submit(self, rank: int, request: Request) -> None:
        """Queues a request."""
        self.requests[request.number] = request
        self._drawn[request.number] = len(request.output_ids)
        self._schedulers[rank].add(request)
        self._wake()

    def cancel(self, rank: int, number: int) -> None:
        """Cancels at the end of the next step."""
        self.cancelled.append(number)
        self._cancels.append((rank, number))
        self._wake()

    def watch_cache(self, *, on: bool) -> None:
        """As Ranks.watch_cache, at once."""
        for cache in self._caches:
            cache.watch(on=on)

    def use_weights(self, path: str, version: int, files: str = "") -> None:
        """As Ranks.use_weights; tokens stay the same."""
        self.weights = path, version

    def forget_lost(self) -> None:
        """They keep nothing."""

    def order(self, order: RankOrder, number: int) -> None:
        """Carried out at the end of the next step."""
        self._orders.append((order, number))
        self._wake()

    async def stop(self) -> None:
        """No step runs any more."""
        self.stopped = True
        self.hold()

    # -- for tests ---------------------------------------------------------------------------------------

    def hold(self) -> None:
        """No step ends until step() or release(); cancels wait too, as for a long step."""
        self._held = True
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None

    def release(self) -> None:
        """Steps run by themselves again."""
        self._held = False
        self._wake()

    def step(self, count: int = 1) -> None:
        """Runs `count` steps on every rank, now."""
        for _ in range(count):
            self._run_step()

    def begin(self, rank: int) -> None:
        """All requests of the rank are in its next step, which does not end."""
        self._told().on_begun(rank, sorted(self._schedulers[rank].live))

    def kill(self, rank: int, message: str = "exit code -9") -> None:
        """The rank dies, and the group with it."""
        self._dead = True
        self.hold()
        self._told().on_rank_lost(rank, LossCause.SIGNAL)
        self._told().on_lost(rank, message, 0.0)

    def fail(self, number: int, message: str) -> None:
        """A rank reports that it cannot run this request."""
        for rank, scheduler in enumerate(self._schedulers):
            if scheduler.fail(number):
                self._told().on_request_failed(rank, number, InternalError(f"rank {rank}: {message}"))

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raises InternalError if a scheduler is inconsistent; with `idle`, if anything is left in one."""
        for scheduler in self._schedulers:
            scheduler.check_integrity()
            load = scheduler.load()
            if idle and (scheduler.has_work or load.kv_blocks_used):
                raise AssertionError(f"not idle: {scheduler!r}")

    # -- one step ----------------------------------------------------------------------------------------

    def _told(self) -> RankListener:
        if self._listener is None:
            raise RuntimeError("start() first")
        return self._listener

    def _wake(self) -> None:
        if self._turn is None and not self._held and not self._dead:
            self._turn = asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._turn = None
        self._run_step()
        if self._cancels or any(scheduler.has_work for scheduler in self._schedulers):
            self._wake()
        else:
            for rank in range(self.num_ranks):
                self._told().on_statistics(self._statistics(rank))

    def _run_step(self) -> None:
        cancels, self._cancels = self._cancels, []
        batches = [scheduler.plan() for scheduler in self._schedulers]
        for rank, number in cancels:  # they arrive while the step runs
            self._schedulers[rank].cancel(number)
        for rank, (scheduler, batch) in enumerate(zip(self._schedulers, batches, strict=True)):
            for piece in batch.slices:
                if piece.scored is not None and scheduler.is_live(piece.number):
                    for part in _scored(piece).parts():
                        self._told().on_prompt_logprobs(rank, part)
            if begun := {piece.number for piece in batch.slices} - self._begun:
                self._begun |= begun
                self._told().on_begun(rank, sorted(begun))
            events = [self._timed(rank, event) for event in scheduler.commit(batch, self._sample(batch))]
            self._steps[rank] += 1
            self._tokens[rank] += batch.num_tokens
            if events:
                self._told().on_tokens(rank, events)
            for number in scheduler.freed():
                self._told().on_freed(rank, number)
            self._caches[rank].publish()
            self._told().on_running(rank, scheduler.running)
        self._carry_out()

    def _carry_out(self) -> None:
        orders, self._orders = self._orders, []
        for order, number in orders:
            for rank, scheduler in enumerate(self._schedulers):
                if isinstance(order, FlushCache):
                    done = OrderDone(number, blocks=scheduler.flush_cache())
                    self._caches[rank].publish()
                elif isinstance(order, PrepareWeights):
                    error = self.refusal if rank == 0 else ""
                    self._preparing = order
                    done = OrderDone(number, error, nbytes=1 << 20, rate=self.copy_rate)
                elif isinstance(order, SwitchChange):
                    assert self._preparing is not None and order.change == self._preparing.change
                    scheduler.flush_cache(self._preparing.version)
                    self._caches[rank].publish()
                    done = OrderDone(number, seconds=LATENCY_NS / 1e9)
                elif isinstance(order, DropChange):
                    done = OrderDone(number)
                elif isinstance(order, StartProfile):
                    self.profile, done = order.name, OrderDone(number)
                else:
                    done = OrderDone(number, files=(f"{self.profile}-rank{rank}.trace.json",))
                self._told().on_order_done(rank, done)

    def _report_cache(self, batch: KvEventBatch) -> None:
        self._told().on_kv_events(batch)

    def _sample(self, batch: StepBatch) -> list[SampledToken]:
        return [self._draw(piece.number) for piece in batch.slices if piece.sample]

    def _draw(self, number: int) -> SampledToken:
        request, index = self.requests[number], self._drawn[number]
        self._drawn[number] += 1
        token = self._next_token(request, index)
        wanted = request.sampling.logprobs
        if wanted is None:
            return SampledToken(number, token)
        top = tuple(((token + i) % VOCABULARY, -0.5 - i) for i in range(wanted))
        return SampledToken(number, token, -0.5, top)

    def _timed(self, rank: int, event: TokenEvent) -> TokenEvent:
        first = self._drawn[event.number] == 1
        return event._replace(
            queued_ns=LATENCY_NS if first else 0,
            step=self._steps[rank],
            weights=self._schedulers[rank].weights,
        )

    # -- what it reports ---------------------------------------------------------------------------------

    def _ready(self, rank: int) -> RankReady:
        return RankReady(
            rank=rank,
            pid=0,
            kv_blocks=self._limits.kv_blocks,
            block_size=self._limits.block_size,
            weight_bytes=1 << 20,
            kv_bytes=1 << 21,
            exchange_bytes=1 << 22,
            load_seconds=0.0,
        )

    def _statistics(self, rank: int) -> RankStatistics:
        steps = self._steps[rank]
        names = ("dispatch/wait", "dispatch/total", "combine/total", "vote/total", "step/total")
        peers = [peer for peer in range(self.num_ranks) if peer != rank]
        return RankStatistics(
            rank=rank,
            load=self._schedulers[rank].load(),
            histograms=dict.fromkeys(names, (0,) * LATENCY_BUCKET + (steps,)),
            sums=dict.fromkeys(names, steps * LATENCY_NS),
            counters={"tokens": self._tokens[rank], "idle_steps": 0},
            peer_wait_ns={("dispatch", peer): steps * 1000 for peer in peers},
            expert_tokens={rank: self._tokens[rank]},
        )


def _scored(piece: SeqSlice) -> PromptLogprobs:
    """Log probabilities like those of drawn tokens."""
    assert piece.scored is not None
    targets, top = piece.scored.targets, range(piece.scored.top)
    return PromptLogprobs(
        piece.number,
        piece.scored.start + 1,
        [-0.5] * len(targets),
        [(token + i) % VOCABULARY for token in targets for i in top],
        [-0.5 - i for _ in targets for i in top],
    )
