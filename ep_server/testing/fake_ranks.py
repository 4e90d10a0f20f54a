"""FakeRanks: a group of ranks in this process: the real scheduler, made-up tokens. No model, no clock.

For tests and for trying the gRPC front without a checkpoint. Tokens depend on the request alone, so they are
known beforehand. A test may hold the steps, run them one by one, kill a rank or fail a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from ep_server.errors import StartupError
from ep_server.ranks.protocol import RankListener
from ep_server.records import RankReady, RankStatistics, Request, SampledToken, StepBatch, TokenEvent
from ep_server.scheduler.batch import SchedulerLimits
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
        self.stopped = False
        self.start_gate: asyncio.Event | None = None  # start() waits for it
        self.start_error: StartupError | None = None  # start() raises it
        self._limits = limits
        self._next_token = next_token
        self._schedulers = [RankScheduler(limits) for _ in range(num_ranks)]
        self._drawn: dict[int, int] = {}
        self._cancels: list[tuple[int, int]] = []
        self._steps = [0] * num_ranks
        self._tokens = [0] * num_ranks
        self._held = False
        self._dead = False
        self._turn: asyncio.Handle | None = None
        self._listener: RankListener | None = None

    def __repr__(self) -> str:
        return f"FakeRanks({self._schedulers!r})"

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

    def submit(self, rank: int, request: Request) -> None:
        """Queues a request."""
        self.requests[request.number] = request
        self._drawn[request.number] = 0
        self._schedulers[rank].add(request)
        self._wake()

    def cancel(self, rank: int, number: int) -> None:
        """Cancels at the end of the next step."""
        self.cancelled.append(number)
        self._cancels.append((rank, number))
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

    def kill(self, rank: int, message: str = "exit code -9") -> None:
        """The rank dies, and the group with it."""
        self._dead = True
        self.hold()
        self._told().on_lost(rank, message)

    def fail(self, number: int, message: str) -> None:
        """A rank reports that it cannot run this request."""
        for rank, scheduler in enumerate(self._schedulers):
            if scheduler.fail(number):
                self._told().on_request_failed(rank, number, message)

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
            events = [self._timed(event) for event in scheduler.commit(batch, self._sample(batch))]
            self._steps[rank] += 1
            self._tokens[rank] += batch.num_tokens
            if events:
                self._told().on_tokens(rank, events)
            for number in scheduler.freed():
                self._told().on_freed(rank, number)

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

    def _timed(self, event: TokenEvent) -> TokenEvent:
        return replace(event, queued_ns=LATENCY_NS) if self._drawn[event.number] == 1 else event

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
