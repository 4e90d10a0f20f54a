"""An explicit-state model of generations: ranks that step, vote, switch, are lost, regroup and join.

Explored over every interleaving of ranks, the front and faults. Knows nothing of the implementation. One
layer, two experts, two slots on each rank. Each rank begins with one request of a few tokens.

A step has four phases. VOTE: the rank has not voted. DISPATCH: it waits for the votes of all, which decide
whether the step runs or a change is switched to. COMPUTE: it waits until all have dispatched, then its slots
compute. COMBINE: it waits until all have computed, then publishes a token of each of its requests. An abort
ends such a wait; the rank then waits for a Regroup.

Where no rank is left, new processes start in all places, and as many as are there go on. What a rank has
voted is in memory that outlives its process.

Step numbers count in a circle of four, which is enough as no rank is two steps ahead: so states are finite
although ranks step for ever. Transitions check what must never happen. Afterwards every state must lead to
one in which all tokens are published, nothing is under way and all live ranks step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

EMPTY, CIRCLE = -1, 4
EXPERTS, SLOTS = 2, 2
RUNNING, KILLED, ENDED, ABSENT = "running", "killed", "ended", "absent"
VOTE, DISPATCH, COMPUTE, COMBINE, REGROUP, RESET = range(6)  # what a rank does next

Place = tuple[int, int]  # rank, slot


class Message(NamedTuple):
    """From the front. kind: prepare, switch, add or regroup; what a kind does not need is empty."""

    kind: str
    change: int = 0
    generation: int = 0
    live: tuple[int, ...] = ()
    places: tuple[Place, ...] = ()
    request: tuple[int, int] = (0, 0)  # its number, the position of its next token


class Rank(NamedTuple):
    """votes: the last two, (generation, step, change offered). work: (request, position of its next token).

    slots: the expert in each. making: the change that it prepares, loaded: whether that is done; ordered: to
    be offered. outbox: tokens published and not read, (request, position)."""

    status: str = ABSENT
    generation: int = 0
    live: tuple[int, ...] = ()
    places: tuple[Place, ...] = ()
    slots: tuple[int, ...] = (EMPTY,) * SLOTS
    phase: int = REGROUP
    step: int = 0
    votes: tuple[tuple[int, int, int], ...] = ((-1, 0, 0),) * 2
    work: tuple[tuple[int, int], ...] = ()
    making: Message | None = None
    loaded: bool = False
    ordered: bool = False
    inbox: tuple[Message, ...] = ()
    outbox: tuple[tuple[int, int], ...] = ()


class Front(NamedTuple):
    """top: the highest generation so far. abort: generations up to it are ended. places: ordered last.

    received: tokens by request. owners: rank by request. change: under way, ordered: it is decided.
    joining: a rank that loads, -1 = none. lost: ranks whose loss is not handled. variant: of places.
    starting: places of all ranks once none was left, until some of the new processes go on."""

    top: int = 0
    abort: int = -1
    live: tuple[int, ...] = ()
    places: tuple[Place, ...] = ()
    received: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()
    change: Message | None = None
    ordered: bool = False
    joining: int = -1
    lost: tuple[int, ...] = ()
    starting: tuple[int, ...] = ()
    variant: int = 0
    made: int = 0
    faults: int = 0
    moves: int = 0
    joins: int = 0


State = tuple[Front, tuple[Rank, ...]]


@dataclass(frozen=True)
class Rules:
    """The protocol, and the ways to break it that the checker must notice.

    await_end: the front regroups once the killed process has ended.
    read_to_end: it reads a lost rank's channel first.
    exact: cells count for their generation alone.
    by_vote: a change is switched to by vote, not by order.
    free_slots: experts are prepared in slots that do not serve.
    drop_steps: a step that did not end is run again.
    await_loaded: the front orders a switch once all ranks have loaded.
    forget_change: a regroup drops the change that was under way.
    abort_waits: a loss ends the waits of the others.
    count_on: generations count on where no rank was left.
    """

    await_end: bool = True
    read_to_end: bool = True
    exact: bool = True
    by_vote: bool = True
    free_slots: bool = True
    drop_steps: bool = True
    await_loaded: bool = True
    forget_change: bool = True
    abort_waits: bool = True
    count_on: bool = True


@dataclass(frozen=True)
class Bounds:
    """tokens: of each request. faults, moves, joins: that happen at most.

    suspects: the front also kills ranks that run, as if they hung.
    """

    ranks: int = 2
    tokens: int = 1
    faults: int = 1
    moves: int = 1
    joins: int = 0
    suspects: bool = True


@dataclass
class Outcome:
    """violation: empty, or what broke, with the steps that lead there."""

    violation: str = ""
    trace: list[str] = field(default_factory=list)
    states: int = 0
    finished: int = 0


class Broken(Exception):
    """What must never happen."""


def places_for(
    before: tuple[Place, ...], live: tuple[int, ...], variant: int, free: bool
) -> tuple[Place, ...]:
    """By expert: where it is to be served. free: in slots that serve nothing before, unless it stays."""
    found: list[Place] = []
    for expert, old in enumerate(before):
        rank = live[(expert + variant) % len(live)]
        taken = {*before, *found} if free else set(found)
        slots = [slot for slot in range(SLOTS) if (rank, slot) not in taken]
        found.append(old if old[0] == rank and old not in found else (rank, slots[0]))
    return tuple(found)


class Model:
    """`explore` visits every reachable state."""

    def __init__(self, bounds: Bounds, rules: Rules | None = None) -> None:
        self.bounds, self.rules = bounds, rules or Rules()

    def start(self) -> State:
        everyone = tuple(range(self.bounds.ranks))
        places = tuple((expert % len(everyone), expert // len(everyone)) for expert in range(EXPERTS))
        ranks = tuple(
            Rank(
                RUNNING,
                0,
                everyone,
                places,
                self._held((EMPTY,) * SLOTS, places, rank),
                VOTE,
                work=((rank, 0),),
            )
            for rank in everyone
        )
        zeros = (0,) * len(everyone)
        return Front(live=everyone, places=places, received=zeros, owners=everyone), ranks

    @staticmethod
    def _held(slots: tuple[int, ...], places: tuple[Place, ...], rank: int) -> tuple[int, ...]:
        held = list(slots)
        for expert, (owner, slot) in enumerate(places):
            if owner == rank:
                held[slot] = expert
        return tuple(held)

    def moves(self, state: State) -> Iterator[tuple[str, State, bool]]:
        """Names of transitions, the states they lead to, and whether they are faults."""
        front, ranks = state
        for number, rank in enumerate(ranks):
            if rank.status in (RUNNING, KILLED):
                for name, new, added in self._rank_moves(front, ranks, number):
                    yield f"rank {number} {name}", (front, _with(ranks, number, new)), added
                if rank.status == KILLED:
                    yield (
                        f"rank {number} ends",
                        (front, _with(ranks, number, rank._replace(status=ENDED))),
                        False,
                    )
        yield from self._faults(state)
        yield from ((name, new, False) for name, new in self._front_moves(front, ranks))

    def _faults(self, state: State) -> Iterator[tuple[str, State, bool]]:
        front, ranks = state
        if front.faults == self.bounds.faults:
            return
        after = front._replace(faults=front.faults + 1)
        for number, rank in enumerate(ranks):
            if rank.status == RUNNING:
                dead = _with(ranks, number, rank._replace(status=ENDED))
                yield f"rank {number} dies", (after, dead), True
                if self.bounds.suspects and number not in (*front.lost, *front.starting):
                    killed = _with(ranks, number, rank._replace(status=KILLED))
                    yield f"the front kills rank {number}", (_lost(after, number), killed), True

    # Ranks.

    def _rank_moves(
        self, front: Front, ranks: tuple[Rank, ...], number: int
    ) -> Iterator[tuple[str, Rank, bool]]:
        rank = ranks[number]
        if rank.making is not None and not rank.loaded:
            yield "loads", self._loads(rank, number), False
        if rank.phase == REGROUP and rank.inbox:
            yield "reads", self._reads(rank, number), False
        elif rank.phase == VOTE:
            read = self._reads(rank, number)
            yield "votes", self._votes(read) if read.phase == VOTE else read, False
        elif rank.phase in (DISPATCH, COMPUTE, COMBINE):
            if self._all_there(ranks, number):
                yield from self._goes_on(ranks, number)
        elif rank.phase == RESET:
            peers = [ranks[peer] for peer in rank.live]
            if all(peer.generation == rank.generation and peer.phase != REGROUP for peer in peers):
                yield "has regrouped", rank._replace(phase=VOTE, step=0), False
        waits = rank.phase in (DISPATCH, COMPUTE, COMBINE, RESET)
        if waits and front.abort >= rank.generation and self.rules.abort_waits:
            work = rank.work
            if not self.rules.drop_steps and rank.phase in (COMPUTE, COMBINE):
                work = self._next_positions(work)
            yield "leaves its wait", rank._replace(phase=REGROUP, work=work), False

    def _loads(self, rank: Rank, number: int) -> Rank:
        assert rank.making is not None
        new = self._held(rank.slots, rank.making.places, number)
        for slot, (old, expert) in enumerate(zip(rank.slots, new, strict=True)):
            if old != expert and rank.phase != REGROUP and (number, slot) in rank.places:
                raise Broken(f"rank {number} overwrites slot {slot}, which serves")
        return rank._replace(slots=new, loaded=True)

    def _reads(self, rank: Rank, number: int) -> Rank:
        """All that the front has sent. Messages that come later are sent later in another interleaving."""
        for message in rank.inbox:
            rank = self._obeys(rank, number, message)
        return rank._replace(inbox=())

    def _obeys(self, rank: Rank, number: int, message: Message) -> Rank:
        if message.kind == "add":
            return rank._replace(work=tuple(sorted((*rank.work, message.request))))
        if message.kind == "prepare":
            return rank._replace(making=message, loaded=False, ordered=False)
        if message.kind == "drop":
            return rank._replace(making=None, loaded=False, ordered=False)
        if message.kind == "switch":
            return self._ordered(rank, message.change)
        return self._regrouped(rank, number, message)

    def _ordered(self, rank: Rank, change: int) -> Rank:
        if rank.making is None or rank.making.change != change:
            return rank
        return rank._replace(ordered=True) if self.rules.by_vote else self._applied(rank)

    def _regrouped(self, rank: Rank, number: int, message: Message) -> Rank:
        if message.generation <= rank.generation and rank.live:
            return rank
        if self.rules.forget_change:
            rank = rank._replace(making=None, loaded=False, ordered=False)
        return rank._replace(
            generation=message.generation,
            live=message.live,
            places=message.places,
            slots=self._held(rank.slots, message.places, number),
            phase=RESET,
        )

    def _votes(self, rank: Rank) -> Rank:
        offer = rank.making.change if rank.making is not None and rank.ordered else 0
        votes = list(rank.votes)
        votes[rank.step % 2] = (rank.generation, rank.step, offer)
        return rank._replace(phase=DISPATCH, votes=tuple(votes))

    def _all_there(self, ranks: tuple[Rank, ...], number: int) -> bool:
        """Whether the peers have come as far as this rank's wait needs."""
        rank = ranks[number]
        for peer in (ranks[each] for each in rank.live):
            if rank.phase == DISPATCH:
                generation, step, _ = peer.votes[rank.step % 2]
                if step != rank.step or (generation != rank.generation and self.rules.exact):
                    return False
                continue
            if peer.generation != rank.generation and self.rules.exact:
                return False
            ahead = (peer.step - rank.step) % CIRCLE
            if ahead > 1 or (ahead == 0 and peer.phase < rank.phase) or peer.phase in (REGROUP, RESET):
                return False
        return True

    def _goes_on(self, ranks: tuple[Rank, ...], number: int) -> Iterator[tuple[str, Rank, bool]]:
        rank = ranks[number]
        if rank.phase == DISPATCH:
            offers = {ranks[each].votes[rank.step % 2][2] for each in rank.live}
            if len(offers) == 1 and 0 not in offers:
                yield "switches", self._applied(rank), False
            else:
                yield "dispatches", rank._replace(phase=COMPUTE), False
        elif rank.phase == COMPUTE:
            self._check_step(ranks, number)
            yield "computes", rank._replace(phase=COMBINE), False
        else:
            fresh = tuple(one for one in rank.work if one[1] < self.bounds.tokens)
            yield (
                "publishes",
                rank._replace(
                    phase=VOTE,
                    step=(rank.step + 1) % CIRCLE,
                    outbox=rank.outbox + fresh,
                    work=self._next_positions(rank.work),
                ),
                False,
            )

    def _next_positions(self, work: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        return tuple((request, at + 1) for request, at in work if at + 1 < self.bounds.tokens)

    def _applied(self, rank: Rank) -> Rank:
        making = rank.making
        assert making is not None
        done = rank._replace(places=making.places, making=None, loaded=False, ordered=False)
        if making.live:
            return done._replace(generation=making.generation, live=making.live, phase=RESET)
        return done._replace(phase=VOTE, step=(rank.step + 1) % CIRCLE)

    def _check_step(self, ranks: tuple[Rank, ...], number: int) -> None:
        rank = ranks[number]
        for each in rank.live:
            peer = ranks[each]
            if (peer.generation, peer.places, peer.live) != (rank.generation, rank.places, rank.live):
                raise Broken(
                    f"ranks {number} and {each} run a step under different generations or placements"
                )
        for expert, (owner, slot) in enumerate(rank.places):
            if owner not in rank.live:
                raise Broken(f"no live rank serves expert {expert}")
            if ranks[owner].slots[slot] != expert:
                raise Broken(f"slot {slot} of rank {owner} does not hold expert {expert}")

    # The front.

    def _front_moves(self, front: Front, ranks: tuple[Rank, ...]) -> Iterator[tuple[str, State]]:
        if front.starting:
            yield from self._replaced(front, ranks)
            return
        for lost in self._noticed(front, ranks):
            yield f"front regroups without ranks {lost}", self._regroups(front._replace(lost=lost), ranks)
        if front.lost:
            return
        change = front.change
        if change is not None and not front.ordered:
            loaded = [ranks[each].making == change and ranks[each].loaded for each in front.live]
            if all(loaded) or (any(loaded) and not self.rules.await_loaded):
                yield "front orders the switch", self._orders_switch(front, ranks, change)
        elif change is not None and all(self._has_switched(ranks[each], change) for each in front.live):
            yield "front sees the switch", (front._replace(change=None, ordered=False, joining=-1), ranks)
        elif change is None:
            if front.moves < self.bounds.moves and len(front.live) > 1:
                yield (
                    "front moves an expert",
                    self._prepares(front._replace(moves=front.moves + 1), ranks, -1),
                )
            absent = [n for n, rank in enumerate(ranks) if n not in front.live]
            if front.joins < self.bounds.joins and absent:
                yield (
                    "front starts a rank",
                    self._prepares(front._replace(joins=front.joins + 1), ranks, absent[0]),
                )

    def _noticed(self, front: Front, ranks: tuple[Rank, ...]) -> Iterator[tuple[int, ...]]:
        """Ranks whose loss the front handles: those that it killed, and any of the others that have ended."""
        if self.rules.await_end and any(ranks[number].status != ENDED for number in front.lost):
            return
        watched = {*front.live, front.joining} - {*front.lost}
        others = [n for n, rank in enumerate(ranks) if rank.status == ENDED and n in watched]
        for count in range(not front.lost, len(others) + 1):
            for some in combinations(others, count):
                yield tuple(sorted((*front.lost, *some)))

    @staticmethod
    def _has_switched(rank: Rank, change: Message) -> bool:
        return rank.making is None and rank.generation >= change.generation and rank.places == change.places

    def _prepares(self, front: Front, ranks: tuple[Rank, ...], joins: int) -> State:
        live = tuple(sorted((*front.live, joins))) if joins >= 0 else front.live
        variant = front.variant + (joins < 0)
        change = Message(
            "prepare",
            front.made + 1,
            front.top + (joins >= 0),
            live if joins >= 0 else (),
            places_for(front.places, live, variant, self.rules.free_slots),
        )
        if joins >= 0:
            slots = self._held((EMPTY,) * SLOTS, change.places, joins)
            ranks = _with(ranks, joins, Rank(RUNNING, -1, slots=slots, votes=ranks[joins].votes))
        for each in front.live:
            ranks = _send(ranks, each, change)
        return front._replace(change=change, made=change.change, joining=joins, variant=variant), ranks

    def _orders_switch(self, front: Front, ranks: tuple[Rank, ...], change: Message) -> State:
        for each in front.live:
            ranks = _send(ranks, each, Message("switch", change.change))
        front = front._replace(places=change.places, ordered=True)
        if front.joining >= 0:
            order = Message("regroup", 0, change.generation, change.live, change.places)
            ranks = _send(ranks, front.joining, order)
            front = front._replace(live=change.live, top=change.generation, joining=-1)
        return front, ranks

    def _regroups(self, front: Front, ranks: tuple[Rank, ...]) -> State:
        live = tuple(each for each in front.live if each not in front.lost)
        if front.joining in front.lost and front.lost == (front.joining,):  # nobody waits for it
            for each in front.live:
                ranks = _send(ranks, each, Message("drop"))
            return front._replace(lost=(), joining=-1, change=None, ordered=False), ranks
        received = list(front.received)
        for number in front.lost:
            if self.rules.read_to_end:
                ranks = self._reads_channel(ranks, number, received)
        front = front._replace(received=tuple(received))
        ended = front.joining if front.joining not in front.lost else -1
        if ended >= 0:  # it has not joined: it starts again later
            ranks = _with(ranks, ended, Rank(votes=ranks[ended].votes))
        if live:
            return self._begins(front, ranks, live)
        for number in range(len(ranks)):
            ranks = self._starts(front, ranks, number)
        everyone = tuple(range(len(ranks)))
        return front._replace(starting=everyone, lost=(), change=None, ordered=False, joining=-1), ranks

    def _starts(self, front: Front, ranks: tuple[Rank, ...], number: int) -> tuple[Rank, ...]:
        slots = self._held((EMPTY,) * SLOTS, front.places, number)
        return _with(ranks, number, Rank(RUNNING, -1, slots=slots, votes=ranks[number].votes))

    def _replaced(self, front: Front, ranks: tuple[Rank, ...]) -> Iterator[tuple[str, State]]:
        """Some of the new processes may be lost. Any that are there go on; the others join later."""
        for number in front.starting:
            if ranks[number].status == ENDED:
                yield f"front starts rank {number} again", (front, self._starts(front, ranks, number))
        for count in range(1, len(front.starting) + 1):
            for live in combinations(front.starting, count):
                there = ranks
                for number in {*front.starting} - {*live}:
                    there = _with(there, number, Rank(votes=ranks[number].votes))
                top = front.top if self.rules.count_on else -1
                after = front._replace(lost=front.starting, starting=(), top=top)
                yield f"front goes on with new ranks {live}", self._begins(after, there, live)

    def _begins(self, front: Front, ranks: tuple[Rank, ...], live: tuple[int, ...]) -> State:
        """The next generation. Requests of lost ranks go to the first live one."""
        generation = front.top + 1
        places = places_for(front.places, live, front.variant, True)
        for each in live:
            ranks = _send(ranks, each, Message("regroup", 0, generation, live, places))
        owners = list(front.owners)
        for request, owner in enumerate(front.owners):
            if owner in front.lost:
                owners[request] = live[0]
                if front.received[request] < self.bounds.tokens:
                    again = Message("add", request=(request, front.received[request]))
                    ranks = _send(ranks, live[0], again)
        after = front._replace(
            top=generation,
            abort=front.top,
            live=live,
            places=places,
            owners=tuple(owners),
            change=None,
            ordered=False,
            joining=-1,
            lost=(),
        )
        return after, ranks

    @staticmethod
    def _reads_channel(ranks: tuple[Rank, ...], number: int, received: list[int]) -> tuple[Rank, ...]:
        for request, position in ranks[number].outbox:
            if position != received[request]:
                word = "repeated" if position < received[request] else "lost"
                raise Broken(f"a token of request {request} is {word}")
            received[request] += 1
        return _with(ranks, number, ranks[number]._replace(outbox=()))

    def _is_finished(self, state: State) -> bool:
        front, ranks = state
        if front.lost or front.starting or front.change is not None or front.joining >= 0:
            return False
        for each in front.live:
            rank = ranks[each]
            if rank.status != RUNNING or rank.phase in (REGROUP, RESET) or rank.work or rank.making:
                return False
            if rank.generation != front.top or rank.inbox:
                return False
        return True

    def _check_tokens(self, state: State) -> None:
        """Of a finished state: every token of every request was published once."""
        front, ranks = state
        received = list(front.received)
        for number in range(len(ranks)):
            ranks = self._reads_channel(ranks, number, received)
        if min(received) < self.bounds.tokens:
            raise Broken(f"tokens are lost: {received}")

    def explore(self) -> Outcome:
        start = self.start()
        came: dict[State, tuple[State, str] | None] = {start: None}
        into: dict[State, list[State]] = {start: []}
        finished, todo = [], [start]
        while todo:
            state = todo.pop()
            name = ""
            try:
                if self._is_finished(state):
                    self._check_tokens(state)
                    finished.append(state)
                for name, new, fault in self.moves(state):
                    if new not in came:
                        came[new] = state, name
                        into[new] = []
                        todo.append(new)
                    if not fault:
                        into[new].append(state)
            except Broken as broken:
                return Outcome(str(broken), [*_trace(came, state), f"after {name!r}"], len(came))
        reached = set(finished)
        todo = finished[:]
        while todo:
            for earlier in into[todo.pop()]:
                if earlier not in reached:
                    reached.add(earlier)
                    todo.append(earlier)
        stuck = next((state for state in came if state not in reached), None)
        if stuck is not None:
            return Outcome("never finishes", _trace(came, stuck), len(came), len(finished))
        return Outcome("", [], len(came), len(finished))


def _with(ranks: tuple[Rank, ...], number: int, rank: Rank) -> tuple[Rank, ...]:
    return (*ranks[:number], rank, *ranks[number + 1 :])


def _send(ranks: tuple[Rank, ...], number: int, message: Message) -> tuple[Rank, ...]:
    return _with(ranks, number, ranks[number]._replace(inbox=(*ranks[number].inbox, message)))


def _lost(front: Front, number: int) -> Front:
    return front._replace(lost=tuple(sorted((*front.lost, number))))


def _trace(came: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    names, link = [], came[state]
    while link is not None:
        names.append(link[1])
        link = came[link[0]]
    return names[::-1]
