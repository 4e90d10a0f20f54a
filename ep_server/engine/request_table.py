"""Table of this server's requests: by id, by number, and counted by rank. Bookkeeping only.

A request keeps its id until its stream ends, and its number until its rank has freed its KV blocks. It is
unread from the end of its stream until its call is over. Units: requests, tokens, blocks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ep_server.engine.active_request import ActiveRequest
from ep_server.engine.admission import Asked, Crowd
from ep_server.engine.observer import RankQueue
from ep_server.errors import InternalError
from ep_server.records import RankLoad, RankReady, Request
from ep_server.scheduler.lifecycle import State
from ep_server.scheduler.placement import spread_rank

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RankCount:
    """Requests of one rank.

    tokens: of prompts and outputs whose KV is on the rank, or soon will be; a shared prompt counts once.
    admitted: sequences in prefill or decode, as the rank reported last.
    adding: number of the request that the rank is putting into its queue; 0 = none.
    """

    waiting: int = 0
    running: int = 0
    releasing: int = 0
    tokens: int = 0
    admitted: int = 0
    adding: int = field(default=0, compare=False)
    priorities: Counter[int] = field(default_factory=Counter)  # of waiting requests

    @property
    def in_flight(self) -> int:
        """Requests that are not freed."""
        return self.waiting + self.running + self.releasing

    @property
    def queue(self) -> RankQueue:
        """Running and queued requests. A request counts as queued until its rank reports that it runs."""
        running = min(self.admitted, self.in_flight)
        return RankQueue(running, self.in_flight - running)


class RequestTable:
    """Every admitted request that is not freed."""

    def __init__(self, num_ranks: int) -> None:
        self.ranks = [RankCount() for _ in range(num_ranks)]
        self._by_id: dict[str, list[ActiveRequest]] = {}  # several where one request has several sequences
        self._by_number: dict[int, ActiveRequest] = {}
        self._sharing: Counter[int] = Counter()  # sequences that share a prompt's blocks, by group
        self._unread: dict[str, list[ActiveRequest]] = {}  # by id, which newer requests may share
        self.unread = 0

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[ActiveRequest]:
        """Requests that have not ended, as a copy: the table may change meanwhile."""
        return iter([active for requests in self._by_id.values() for active in requests])

    @property
    def open_streams(self) -> int:
        """Of all ranks, not yet read to their end."""
        return sum(rank.waiting + rank.running for rank in self.ranks) + self.unread

    def releasing(self) -> list[ActiveRequest]:
        """Requests that have ended and hold KV blocks."""
        return [active for active in self._by_number.values() if active.state.ended]

    def with_id(self, request_id: str) -> Sequence[ActiveRequest]:
        """The requests that have this id and have not ended."""
        return tuple(self._by_id.get(request_id, ()))

    def unread_with_id(self, request_id: str) -> Sequence[ActiveRequest]:
        """The requests that had this id and whose callers have not read them to the end."""
        return tuple(self._unread.get(request_id, ()))

    def with_number(self, number: int) -> ActiveRequest | None:
        """The request with this number, ended or not."""
        return self._by_number.get(number)

    def add(self, active: ActiveRequest) -> None:
        """A request was admitted."""
        self._by_id.setdefault(active.request.request_id, []).append(active)
        self._by_number[active.request.number] = active
        count = self.ranks[active.rank]
        _count_waiting(count, active, 1)
        group = _group(active.request)
        if not self._sharing[group]:
            count.tokens += len(active.request.prompt_ids)
        self._sharing[group] += 1

    def begin(self, rank: int, numbers: Sequence[int], adding: int = 0) -> None:
        """A rank begins to compute these requests, or is adding one."""
        self.ranks[rank].adding = adding
        for number in numbers:
            active = self._by_number.get(number)
            if active is not None and active.rank == rank:
                active.begun = True

    def lost(self, rank: int) -> None:
        """A rank was lost: counts it for each of its requests. The next process has begun none of them."""
        count = self.ranks[rank]
        for active in self:
            if active.rank == rank:
                active.losses += 1
                active.suspected += active.begun or active.request.number == count.adding
                active.begun = False
        count.adding = 0

    def started(self, active: ActiveRequest) -> None:
        """Its first token arrived."""
        count = self.ranks[active.rank]
        _count_waiting(count, active, -1)
        count.running += 1

    def grew(self, active: ActiveRequest) -> None:
        """Another token arrived."""
        active.output_tokens += 1
        self.ranks[active.rank].tokens += 1

    def ended(self, active: ActiveRequest) -> None:
        """Its stream ended; after the last stream of its id, the id is free again."""
        _remove(self._by_id, active)
        if not active.stream.closed:
            self._unread.setdefault(active.request.request_id, []).append(active)
            self.unread += 1
        count = self.ranks[active.rank]
        if active.output_tokens:
            count.running -= 1
        else:
            _count_waiting(count, active, -1)
        count.releasing += 1

    def read(self, active: ActiveRequest) -> None:
        """The call of an ended request is over."""
        _remove(self._unread, active)
        self.unread -= 1

    def freed(self, active: ActiveRequest) -> None:
        """Its KV blocks are free."""
        del self._by_number[active.request.number]
        count = self.ranks[active.rank]
        count.releasing -= 1
        count.tokens -= active.output_tokens
        group = _group(active.request)
        self._sharing[group] -= 1
        if not self._sharing[group]:
            del self._sharing[group]
            count.tokens -= len(active.request.prompt_ids)

    def call_of(self, active: ActiveRequest) -> list[ActiveRequest]:
        """The sequences of its call that have not ended."""
        found = self._by_id.get(active.request.request_id, ())
        return [each for each in found if _group(each.request) == _group(active.request)]

    def run_again(self) -> Counter[int]:
        """By rank: tokens of requests that it was given after a loss, and that have no token since."""
        found = Counter[int]()
        for active in self:
            if active.losses and active.submitted:
                found[active.rank] += len(active.request.prompt_ids) + active.output_tokens
        return found

    def give(
        self, active: ActiveRequest, ready: Sequence[RankReady], tokens: Counter[int]
    ) -> list[ActiveRequest]:
        """A request and the others of its call continue at one of these ranks.

        tokens: by rank, of all that it has to run again; counts these too. Returns: all of the call.
        """
        call = self.call_of(active)
        rank = spread_rank(self.loads(ready), tokens)
        tokens[rank] += sum(len(each.request.prompt_ids) + each.output_tokens for each in call)
        self.move(call, rank)
        return call

    def move(self, call: Sequence[ActiveRequest], rank: int) -> None:
        """All sequences that the table has of one call get another rank."""
        prompt = len(call[0].request.prompt_ids)
        self.ranks[call[0].rank].tokens -= prompt
        self.ranks[rank].tokens += prompt
        for active in call:
            _count_active(self.ranks[active.rank], active, -1)
            # A handle of its KV blocks names the rank before: nobody could fetch them at another one.
            hold = active.request.hold if active.rank == rank else b""
            active.rank, active.request = rank, replace(active.request, dp_rank=rank, hold=hold)
            _count_active(self.ranks[rank], active, 1)
            log.debug("request %s continues at rank %d", active.request.request_id, rank)

    def loads(self, ready: Sequence[RankReady]) -> Mapping[int, RankLoad]:
        """Load of each live rank, waiting requests included; newer than the rank's own report."""
        return {
            rank.rank: RankLoad(
                running=count.running + count.releasing,
                waiting=count.waiting,
                kv_blocks_used=-(-count.tokens // rank.block_size),
                kv_blocks_total=rank.kv_blocks,
            )
            for rank in ready
            for count in (self.ranks[rank.rank],)
        }

    def crowd(self, asked: Asked) -> Crowd:
        """Load that a request finds."""
        ranks = self.ranks if asked.dp_rank is None else [self.ranks[asked.dp_rank]]
        counts = [(priority, n) for rank in ranks for priority, n in rank.priorities.items()]
        behind = sum(n for priority, n in counts if priority < asked.priority)
        active = sum(rank.waiting + rank.running for rank in ranks)
        return Crowd(self.open_streams, sum(rank.in_flight for rank in ranks), active - behind, behind)

    def behind(self, asked: Asked, count: int) -> list[ActiveRequest]:
        """Whole requests waiting behind one, at least `count` sequences, last in order first.

        Empty if there are not as many: some sequences of a request may have a token already.
        """
        found: list[ActiveRequest] = []
        for requests in sorted(self._by_id.values(), key=lambda each: _order(each[0])):
            if len(found) >= count or requests[0].request.priority >= asked.priority:
                break
            on_rank = asked.dp_rank is None or requests[0].rank == asked.dp_rank
            if on_rank and all(active.state is State.QUEUED for active in requests):
                found += requests
        return found if len(found) >= count else []

    def check_integrity(self) -> None:
        """Raises InternalError if tables, states or counts disagree."""
        counted, sharing = [RankCount(admitted=rank.admitted) for rank in self.ranks], Counter[int]()
        for number, active in self._by_number.items():
            has_id = any(other is active for other in self._by_id.get(active.request.request_id, ()))
            if active.request.number != number or active.state.ended is has_id:
                raise InternalError(f"request number {number} is {active.state}, has its id: {has_id}")
            if has_id and active.stream.ended:
                raise InternalError(f"request number {number} is {active.state} and its stream is over")
            if not has_id and (active.cancelled_at is None or active.timer is not None):
                raise InternalError(
                    f"request number {number} ended, and neither a cancel nor a timer frees it"
                )
            count = counted[active.rank]
            if active.state is State.QUEUED:
                _count_waiting(count, active, 1)
            count.running += active.state is State.RUNNING
            count.releasing += active.state.ended
            count.tokens += active.output_tokens
            group = _group(active.request)
            count.tokens += 0 if sharing[group] else len(active.request.prompt_ids)
            sharing[group] += 1
        if sharing != self._sharing:
            raise InternalError(f"prompts are shared by {self._sharing}, the requests give {sharing}")
        if counted != self.ranks:
            raise InternalError(f"counts by rank are {self.ranks}, the requests give {counted}")
        if any(self._by_number.get(active.request.number) is not active for active in self):
            raise InternalError("a request has an id and no number")
        unread = [active for requests in self._unread.values() for active in requests]
        if len(unread) != self.unread or any(f.stream.closed or not f.state.ended for f in unread):
            raise InternalError(f"{self.unread} unread requests, the table has {unread}")


def _group(request: Request) -> int:
    """Number of the first sequence of its call."""
    return request.group or request.number


def _order(active: ActiveRequest) -> tuple[int, int]:
    return active.request.priority, -active.request.number


def _count_active(count: RankCount, active: ActiveRequest, change: int) -> None:
    """A sequence that has not ended, without its prompt."""
    if active.state is State.QUEUED:
        _count_waiting(count, active, change)
    else:
        count.running += change
    count.tokens += change * active.output_tokens


def _count_waiting(count: RankCount, active: ActiveRequest, change: int) -> None:
    count.waiting += change
    count.priorities[active.request.priority] += change
    if not count.priorities[active.request.priority]:
        del count.priorities[active.request.priority]


def _remove(table: dict[str, list[ActiveRequest]], active: ActiveRequest) -> None:
    requests = table[active.request.request_id]
    requests.remove(active)
    if not requests:
        del table[active.request.request_id]
