"""[3] Admits requests and submits them to ranks; owns request numbers.

Runs in one event loop. `admission` decides whether a request has room, the scheduler picks its rank, and
`delivery` follows it to its end.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace

from ep_server.engine.active_request import ActiveRequest, Submission, asked_by
from ep_server.engine.admission import MOST_URGENT, Admission, AdmissionLimits, Asked
from ep_server.engine.balancer import Balancer
from ep_server.engine.delivery import Delivery
from ep_server.engine.kv_events import KvSubscription
from ep_server.engine.observer import EngineObserver, NullObserver, RankQueue, counting_refusals
from ep_server.engine.profiles import Profiles
from ep_server.engine.recovery import Recovery
from ep_server.engine.request_table import RequestTable
from ep_server.engine.state import EngineSettings, EngineState, EngineStatistics, live_nodes
from ep_server.engine.stream import TokenStream
from ep_server.engine.weights import Weights, WeightsUpdated
from ep_server.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    EpServerError,
    InternalError,
    RankLost,
    RequestCancelled,
    Unavailable,
)
from ep_server.orders import FlushCache, ReleaseKv
from ep_server.ranks.protocol import GroupState, Ranks
from ep_server.records import RankReady, Request
from ep_server.scheduler.lifecycle import Event
from ep_server.scheduler.placement import choose_rank

__all__ = ["Engine", "EngineObserver", "EngineSettings", "EngineState", "EngineStatistics", "live_nodes"]


class Engine:
    """The server process's end of a group of ranks.

    lost: set once a rank is lost and not replaced; `lost_message` then says which and why.
    rank_statistics: the newest measurements of each rank that reported any.
    ready: what the live ranks reported when they were ready, in rank order.
    """

    def __init__(
        self,
        ranks: Ranks,
        settings: EngineSettings,
        observer: EngineObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """draw: from [0, 1), the jitter of the retry push-back."""
        self.settings = settings
        self.max_context = settings.max_context
        self.num_ranks = ranks.num_ranks
        self._state = EngineState.STARTING
        self._ranks = ranks
        self._observer: EngineObserver = observer or NullObserver()
        self._clock = clock
        limits = AdmissionLimits(
            ranks.num_ranks, settings.max_running, settings.max_queue, settings.max_streams
        )
        self._admission = Admission(limits, draw)
        self._requests = RequestTable(ranks.num_ranks)
        per_node = settings.ranks_per_node or ranks.num_ranks
        self._delivery = Delivery(
            ranks,
            self._requests,
            self._observer,
            clock,
            self._admission.pace,
            per_node,
            self._recovers,
            self._warm,
        )
        self.lost, self.rank_statistics = self._delivery.lost, self._delivery.rank_statistics
        self.ready: list[RankReady] = []
        self._recovery = Recovery(self._delivery, settings, self._restart, self._observer, clock)
        self.weights = Weights(
            self._delivery.orders, settings.checkpoint, ranks.use_weights, settings.max_pause
        )
        self.balancer = Balancer(self._delivery, settings.balance, self._observer)
        self._profiles = Profiles(self._delivery.orders, settings.profiles)
        self._numbers = itertools.count(1)
        self._submitted = 0
        self._no_streams = asyncio.Event()
        self._no_streams.set()

    def __repr__(self) -> str:
        return f"<Engine {self.statistics()}>"

    @property
    def state(self) -> EngineState:
        """State of the server."""
        if self._state is EngineState.STOPPED:
            return self._state
        if self._delivery.lost.is_set():
            return EngineState.LOST
        recovering = self._delivery.down and self._state is EngineState.SERVING
        return EngineState.RECOVERING if recovering else self._state

    @property
    def group(self) -> GroupState | None:
        """Which ranks serve, where ranks outlive the loss of others."""
        return self._delivery.group

    @property
    def lost_message(self) -> str:
        """Which rank was lost, and why."""
        return self._delivery.lost_message

    async def start(self, progress: Callable[[int, str, int, int], None]) -> None:
        """Starts the ranks; accepts requests once it returns. Raises: StartupError."""
        self._warm(await self._ranks.start(self._delivery, progress))
        self._observer.on_queues(self.queues)
        self.balancer.start()
        if self._state is EngineState.STARTING:
            self._state = EngineState.SERVING

    def _warm(self, ready: Sequence[RankReady]) -> None:
        """These ranks are ready; the others are absent."""
        self.ready = sorted(ready, key=lambda rank: rank.rank)
        self._admission.resize(len(self.ready))
        kv_tokens = min(rank.kv_blocks * rank.block_size for rank in self.ready)
        self.max_context = min(self.settings.max_context, kv_tokens)
        for rank in self.ready:
            self._observer.on_rank_ready(rank)

    async def _restart(self) -> None:
        restarted = await self._ranks.restart(self._delivery.awaited)
        self._warm(restarted.ready)
        self._delivery.replaced(restarted, self.max_context)

    def _recovers(self, rank: int | None) -> bool:
        self._profiles.end()
        if self._state not in (EngineState.SERVING, EngineState.DRAINING):
            return rank is None  # nobody waits for the ranks any more
        return self._recovery.begin(rank)

    def check_room(self, asked: Asked = MOST_URGENT) -> None:
        """Refuses a request before the rest of it is read. submit() decides again.

        Args:
            asked: by default a request that fits if any does.

        Raises: Unavailable, Draining, RankLost, DeadlineExceeded, InvalidArgument, QueueFull.
        """
        self._check_now(asked)
        self._admission.check(asked, self._requests.crowd(asked))

    def submit(self, sequences: Sequence[Submission]) -> list[tuple[Request, TokenStream]]:
        """Admits a request and gives it to a rank. `close()` the streams when their reader leaves.

        A full queue makes room for a higher priority: the last waiting request in order is refused.

        Args:
            sequences: of one request, at least one: same id, prompt and limits.
        Returns: for each, the request as the rank gets it (number, dp_rank) and its tokens.

        Raises: Unavailable, Draining, RankLost, DuplicateRequest, ContextLengthExceeded, DeadlineExceeded,
            InvalidArgument, QueueFull. Nothing is left behind then.
        """
        asked = asked_by(sequences)
        self._check_now(asked)
        self._check_request(sequences[0].request)
        self._make_room(asked)
        loads = self._requests.loads(self.ready)
        rank = choose_rank(loads, sequences[0].request, self.num_ranks, sequences[0].near)
        admitted: list[tuple[Request, TokenStream]] = []
        numbers = list(itertools.islice(self._numbers, len(sequences)))
        group = numbers[0] if len(numbers) > 1 else 0
        try:
            for submission, number in zip(sequences, numbers, strict=True):
                request = replace(submission.request, number=number, dp_rank=rank, group=group)
                admitted.append(self._submit(submission, request, rank))
        except BaseException:
            for _, stream in admitted:
                stream.close()
            raise
        self._delivery.tell_load()
        return admitted

    def queues(self) -> list[RankQueue]:
        """Running and queued requests of each rank, now. From any thread."""
        return [count.queue for count in self._requests.ranks]

    def counting_refusals(self) -> AbstractContextManager[None]:
        """Reports an error raised inside to the observer: a request that no rank will see."""
        return counting_refusals(self._observer)

    def abort(self, request_id: str) -> bool:
        """Ends a request with CANCELLED; False if it neither runs nor is being read."""
        error = RequestCancelled(f"request {request_id!r} was aborted")
        requests, unread = self._requests.with_id(request_id), self._requests.unread_with_id(request_id)
        for active in requests:
            self._delivery.fail(active, Event.CANCEL, error)
        for active in unread:
            active.end_call(error)
        return bool(requests or unread)

    async def flush_cache(self, seconds: float) -> int:
        """Makes all ranks forget their cached prefixes. Running requests go on, and add none.

        Returns: blocks forgotten, over all ranks, once every rank has done so.
        Raises: Unavailable, Draining, RankLost; DeadlineExceeded after `seconds`.
        """
        self._check_serving()
        self._ranks.forget_lost()  # what lost ranks have left too
        return await self._blocks(FlushCache(), seconds, "flushing the prefix cache")

    async def release_kv(self, key: bytes, seconds: float) -> int:
        """Frees the blocks held for another server under this key. Returns, raises: as flush_cache()."""
        return await self._blocks(ReleaseKv(key), seconds, "freeing held KV blocks")

    async def _blocks(self, order: FlushCache | ReleaseKv, seconds: float, what: str) -> int:
        self._check_serving()
        answers = await self._delivery.orders.give(order, seconds, what)
        return sum(done.blocks for done in answers)

    async def update_weights(self, path: str, check: Callable[[str], str]) -> WeightsUpdated:
        """Switches to the weights of another checkpoint of the same shapes. No stream ends.

        check: raises an error for a path that cannot be used, and returns PrepareWeights.files; called in
            another thread.
        Returns: once all ranks have switched. Requests submitted afterwards see the new weights only.
        Raises: Unavailable, Draining, RankLost; as Weights.update().
        """
        self._check_serving()
        return await self.weights.update(path, check)

    async def scale(self, ranks: int, hold_out: Sequence[int]) -> float:
        """As Ranks.scale(). No stream ends. Raises: Unavailable, Draining too."""
        self._check_serving()
        return await self._delivery.orders.alone(
            "Scale", lambda: self._ranks.scale(ranks, frozenset(hold_out))
        )

    def subscribe_kv_events(self, start: int = 0) -> KvSubscription:
        """Changes of all ranks' prefix caches; the content first, unless `start` can be resumed from.

        Args:
            start: sequence number of the first batch wanted, of every rank; 0: the content now.
        Raises: Unavailable, Draining, RankLost.
        """
        self._check_serving()
        return self._delivery.kv_events.subscribe(start)

    async def start_profile(self, steps: int | None = None) -> str:
        """Has every rank write a profile into profile.directory. It ends after `steps` steps of work.

        Args:
            steps: at most profile.max_steps, which is the default.
        Returns: the name that its files begin with.
        Raises: SwitchedOff without that folder; WrongState while another runs; InvalidArgument; Unavailable,
            Draining, RankLost, DeadlineExceeded.
        """
        self._check_serving()
        return await self._profiles.start(steps)

    async def stop_profile(self) -> Sequence[str]:
        """Ends the profile. Returns: its files, once they are written; each on the host of its rank.

        Raises: WrongState if none runs; Unavailable, Draining, RankLost, DeadlineExceeded.
        """
        self._check_serving()
        return await self._profiles.stop()

    async def drain(self, seconds: float) -> bool:
        """Refuses new requests and waits for the streams to end.

        Returns: True if all ended by themselves; those left after `seconds` end with UNAVAILABLE.
        """
        if self._state in (EngineState.STARTING, EngineState.SERVING):
            self._state = EngineState.DRAINING
        await self.streams_closed(seconds)
        self.balancer.stop()
        left = list(self._requests)
        for active in left:
            error = Draining("the server stopped before the request finished")
            self._delivery.fail(active, Event.FAIL, error)
        self._profiles.end()
        self._delivery.orders.end(Draining("the server is shutting down"))
        self._delivery.kv_events.end(Draining("the server is shutting down"))
        return not left

    async def streams_closed(self, seconds: float) -> None:
        """Waits until no stream has a reader, at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._no_streams.wait()

    async def stop(self) -> None:
        """Ends the ranks; streams still open end with UNAVAILABLE. Idempotent."""
        await self.drain(0)
        self._state = EngineState.STOPPED
        await self._recovery.stop()
        await self._ranks.stop()

    def statistics(self) -> EngineStatistics:
        """Current counts."""
        ranks = self._requests.ranks
        return EngineStatistics(
            state=self.state,
            in_flight=len(self._requests),
            running=sum(rank.running for rank in ranks),
            waiting=sum(rank.waiting for rank in ranks),
            releasing=sum(rank.releasing for rank in ranks),
            open_streams=self._requests.open_streams,
            submitted=self._submitted,
        )

    def check_integrity(self) -> None:
        """Raises InternalError if tables and counts disagree. For tests and idle moments."""
        self._requests.check_integrity()
        if self._no_streams.is_set() == bool(self._requests.open_streams):
            raise InternalError(f"open streams do not fit in {self!r}")

    def _check_now(self, asked: Asked) -> None:
        if self.state is not EngineState.RECOVERING:  # new requests wait as the others do
            self._check_serving()
        if asked.timeout is not None and asked.timeout <= 0:
            raise DeadlineExceeded("the deadline passed before the request was admitted")

    def _check_serving(self) -> None:
        if self.state is EngineState.STARTING:
            raise Unavailable("the server is starting: its ranks are loading weights")
        if self.state is EngineState.LOST:
            raise RankLost(self.lost_message)
        if self.state is EngineState.RECOVERING:
            raise Unavailable(f"{self.lost_message}; the ranks are being started again")
        if self.state is not EngineState.SERVING:
            raise Draining("the server is shutting down")

    def _check_request(self, request: Request) -> None:
        if self._requests.with_id(request.request_id):
            raise DuplicateRequest(f"request_id {request.request_id!r} is in flight")
        length = len(request.prompt_ids) + request.stopping.max_new_tokens
        if length > self.max_context:
            raise ContextLengthExceeded(f"prompt + max_new_tokens = {length}: at most {self.max_context}")

    def _make_room(self, asked: Asked) -> None:
        """Refuses the waiting requests whose place this one takes. Raises: QueueFull if there are too few."""
        crowd = self._requests.crowd(asked)
        over = self._admission.check(asked, crowd)
        if not over:
            return
        leaving = self._requests.behind(asked, over)
        if not leaving:  # those waiting belong to requests that have begun
            raise self._admission.displaced(crowd.ahead + crowd.behind)
        for active in leaving:
            self._delivery.fail(active, Event.FAIL, self._admission.displaced(crowd.ahead + crowd.behind))

    def _submit(self, submission: Submission, request: Request, rank: int) -> tuple[Request, TokenStream]:
        now = self._clock()
        stream = TokenStream(
            self.settings.stream_buffer,
            submission.stream_interval,
            lambda error: self._on_stream_closed(active, error),
        )
        active = ActiveRequest(
            request, rank, submission.text, stream, now, submission.traceparent, submission.end_call
        )
        if not self._delivery.down:
            # Before anything is counted: an error here leaves nothing to undo.
            self._ranks.submit(rank, request)
            active.submitted = True
        if submission.timeout is not None:
            active.deadline = now + submission.timeout
            loop = asyncio.get_running_loop()
            active.timer = loop.call_later(submission.timeout, self._delivery.expire, active)
        self._requests.add(active)
        self._submitted += 1
        self._no_streams.clear()
        self._observer.on_admitted(len(request.prompt_ids))
        return request, stream

    def _on_stream_closed(self, active: ActiveRequest, error: EpServerError | None) -> None:
        self._delivery.reader_left(active, error)
        if not self._requests.open_streams:
            self._no_streams.set()
