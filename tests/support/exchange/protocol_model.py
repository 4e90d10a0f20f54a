"""An explicit-state model of the exchange's cell protocol, explored over every interleaving.

Models, per operation and bank, the slots, header cells and consumed cells; one token per rank, whose row
goes to every peer. Knows nothing of the implementation: what a slot holds is reduced to the epoch that
wrote it. Every transition moves one rank by one store, one read or one wait, and strictly increases a
measure, so every run ends; a run that ends anywhere but in DONE, an error or death is a deadlock.

Programs are lists of halves: "Ds1" sends dispatch 1, "Dr1" receives it with a copy, "Dv1" receives it as an
in-place view that the matching combine send reads and releases, "Cs1" and "Cr1" send and receive combine 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache

DISPATCH, COMBINE = 0, 1
NEVER = 1 << 30


class Status(IntEnum):
    """Of one rank. Everything from DONE on makes no further step."""

    RUNNING = 0
    DONE = 1
    DEAD = 2
    TIMEOUT = 3
    ABORTED = 4
    HOOK_NOT_CALLED = 5


@dataclass(frozen=True)
class Rules:
    """The protocol, and the ways to break it that the checker must notice.

    acknowledge: "consumed" = a send waits for consumed cells; "combine" = it waits only until its own rank
      received the combine that many operations ago; "none" = it waits for nothing.
    prefix: a consumed cell names the unbroken prefix of read epochs, not just the last one read.
    data_first: the header cell is stored after the row.
    exact: a header counts as arrived only if its epoch is equal, not merely non-zero.
    own_slots: a combine writes into slots of its own rank; else all ranks share one slot per token.
    fused: a row and its header are stored in one step, and all rows are read in one. Fewer states; what
      happens between the two halves of such a step is left to the models of two ranks.
    """

    num_banks: int = 2
    acknowledge: str = "consumed"
    prefix: bool = True
    data_first: bool = True
    exact: bool = True
    own_slots: bool = True
    fused: bool = False


@dataclass(frozen=True)
class Fault:
    """What goes wrong, once. kind: "dies" at any step; "stalls" for longer than deadlines at any step and
    goes on later; "masked" by all others from the start, without knowing it. mask: a wait that expires masks
    who is missing, instead of aborting the group."""

    kind: str
    rank: int
    mask: bool = False


@dataclass
class Outcome:
    """violation: empty, or what broke, with the steps that lead there. ends: statuses of the final states."""

    violation: str = ""
    trace: list[str] = field(default_factory=list)
    states: int = 0
    ends: set[tuple[Status, ...]] = field(default_factory=set)


@dataclass(frozen=True)
class Step:
    """One atomic step of a rank.

    kind: open, write, publish, send (write and publish), await, read (peer -1: of all), consume."""

    kind: str
    op: int
    epoch: int
    peer: int = -1
    value: int = 0  # consume: what the cell says; open: 1 if the bank's last operation was never received


class Model:
    """One group: programs, rules and a fault; `explore` visits every reachable state.

    A state is one bytes object: per rank a program counter, a status and a mask of peers; the abort flag;
    per (op, rank, bank) who arrived; per (op, reader, bank, writer) header and slot; per (op, reader, writer)
    consumed.
    """

    def __init__(self, programs: list[list[str]], rules: Rules, fault: Fault | None = None) -> None:
        self.ranks, self.rules, self.fault = len(programs), rules, fault
        self.steps = [compile_program(program, r, self.ranks, rules) for r, program in enumerate(programs)]
        self.read_at = [
            {
                (s.op, s.epoch, peer): at
                for at, s in enumerate(steps)
                if s.kind == "read"
                for peer in self._peers(s)
            }
            for steps in self.steps
        ]
        ranks, banks = self.ranks, rules.num_banks
        self.status, self.mask, self.abort = ranks, 2 * ranks, 3 * ranks
        self.arrived = self.abort + 1
        self.header = self.arrived + 2 * ranks * banks
        self.slot = self.header + 2 * ranks * banks * ranks
        self.consumed = self.slot + 2 * ranks * banks * ranks
        self.size = self.consumed + 2 * ranks * ranks

    def start(self) -> bytes:
        """The state before anybody moved."""
        state = bytearray(self.size)
        if self.fault is not None and self.fault.kind == "masked":
            for rank in range(self.ranks):
                if rank != self.fault.rank:
                    state[self.mask + rank] = 1 << self.fault.rank
        return bytes(state)

    def explore(self) -> Outcome:
        """Visits every state; stops at the first violation, with its trace."""
        outcome, first = Outcome(), self.start()
        parents: dict[bytes, tuple[bytes, str] | None] = {first: None}
        todo = [first]
        while todo:
            state = todo.pop()
            moved = False
            for label, following, problem in self.successors(state):
                moved = True
                if problem:
                    outcome.violation, outcome.trace = problem, [*_path(parents, state), label]
                    outcome.states = len(parents)
                    return outcome
                if following not in parents:
                    parents[following] = (state, label)
                    todo.append(following)
            if not moved:
                statuses = tuple(Status(s) for s in state[self.status : self.status + self.ranks])
                outcome.ends.add(statuses)
                if Status.RUNNING in statuses:
                    outcome.violation, outcome.trace = f"deadlock: {statuses}", _path(parents, state)
                    break
        outcome.states = len(parents)
        return outcome

    def successors(self, state: bytes) -> Iterator[tuple[str, bytes, str]]:
        """(label, next state, violation or "") of every step that any rank could take now."""
        for rank in range(self.ranks):
            if state[self.status + rank]:
                continue
            step, following = self.steps[rank][state[rank]], bytearray(state)
            label = _label(rank, step)
            missing = self._missing(state, rank, step)
            if step.kind == "open" and step.value:
                following[self.status + rank] = Status.HOOK_NOT_CALLED
                yield f"{label}: hook not called", bytes(following), ""
            elif missing == 0:
                problem = self._act(following, rank, step)
                self._advance(following, rank)
                yield label, bytes(following), problem
            elif state[self.abort]:
                following[self.status + rank] = Status.ABORTED
                yield f"{label}: aborted", bytes(following), ""
            elif self._may_expire(state, rank):
                assert self.fault is not None
                if self.fault.mask:
                    following[self.mask + rank] |= missing
                else:
                    following[self.abort], following[self.status + rank] = 1, Status.TIMEOUT
                yield f"{label}: expired, missing {missing:b}", bytes(following), ""
            if self.fault is not None and self.fault.kind == "dies" and self.fault.rank == rank:
                dead = bytearray(state)
                dead[self.status + rank] = Status.DEAD
                yield f"rank {rank}: dies", bytes(dead), ""

    def _missing(self, state: bytes, rank: int, step: Step) -> int:
        """Bits of the unmasked peers that this step still has to wait for."""
        if step.kind == "await":
            cells, want = self._at(self.header, step.op, rank, step.epoch), step.epoch
        elif step.kind == "open" and step.epoch > self.rules.num_banks:
            if self.rules.acknowledge != "consumed":
                return 0  # "combine" is program order: this rank received that combine before it came here
            cells, want = self._consumed(step.op, rank), step.epoch - self.rules.num_banks
        else:
            return 0
        missing = 0
        for peer in range(self.ranks):
            if peer != rank and not state[self.mask + rank] >> peer & 1:
                seen = state[cells + peer]
                there = seen >= want if step.kind == "open" or self.rules.exact else seen > 0
                missing |= (not there) << peer
        return missing

    def _may_expire(self, state: bytes, rank: int) -> bool:
        """A deadline can pass only where the fault has made somebody slow."""
        if self.fault is None:
            return False
        if self.fault.kind == "dies":
            return state[self.status + self.fault.rank] == Status.DEAD
        return self.fault.kind == "stalls" or rank == self.fault.rank

    def _act(self, state: bytearray, rank: int, step: Step) -> str:
        """Performs a step whose wait is over; returns what it broke, or ""."""
        masked = state[self.mask + rank]
        if step.kind == "await":
            return self._arrive(state, rank, step)
        if step.kind == "read":
            found = [self._read(state, rank, step, peer) for peer in self._peers(step) if peer != rank]
            return "".join(found)
        if step.kind == "open" or masked >> step.peer & 1:
            return ""
        if step.kind == "consume":
            cell = self._consumed(step.op, step.peer) + rank
            state[cell] = max(state[cell], step.value)
        if step.kind in ("publish", "send"):
            state[self._at(self.header, step.op, step.peer, step.epoch) + rank] = step.epoch
        return self._write(state, rank, step) if step.kind in ("write", "send") else ""

    def _peers(self, step: Step) -> range:
        """Whom a step concerns: one peer, or all ranks."""
        return range(self.ranks) if step.peer < 0 else range(step.peer, step.peer + 1)

    def _arrive(self, state: bytearray, rank: int, step: Step) -> str:
        cells, bits = self._at(self.header, step.op, rank, step.epoch), 0
        for peer in range(self.ranks):
            if peer != rank and not state[self.mask + rank] >> peer & 1:
                if state[cells + peer] > step.epoch:
                    return f"rank {rank} waits for {'DC'[step.op]}{step.epoch}, the cell of {peer} is newer"
                bits |= 1 << peer
        state[self._arrived(step, rank)] = bits
        return ""

    def _write(self, state: bytearray, rank: int, step: Step) -> str:
        reader = step.peer
        cell = self._slot(step, reader, rank)
        old = state[cell]
        state[cell] = step.epoch
        waiting = state[self.status + reader] == Status.RUNNING and not state[self.mask + reader] >> rank & 1
        if old and waiting and state[reader] <= self.read_at[reader].get((step.op, old, rank), NEVER):
            return f"rank {rank} overwrites {'DC'[step.op]}{old} at rank {reader}, which has not read it"
        return ""

    def _read(self, state: bytearray, rank: int, step: Step, peer: int) -> str:
        if not state[self._arrived(step, rank)] >> peer & 1:
            return ""
        if not _writes_row(step.op, step.epoch, peer, rank, self.ranks, self.rules):
            return ""
        found = state[self._slot(step, rank, peer)]
        wrong = f"rank {rank} reads {'DC'[step.op]}{step.epoch} of {peer} and finds epoch {found}"
        return "" if found == step.epoch else wrong

    def _advance(self, state: bytearray, rank: int) -> None:
        state[rank] += 1
        if state[rank] == len(self.steps[rank]):
            state[self.status + rank] = Status.DONE

    def _at(self, region: int, op: int, reader: int, epoch: int) -> int:
        bank = epoch % self.rules.num_banks
        return region + ((op * self.ranks + reader) * self.rules.num_banks + bank) * self.ranks

    def _slot(self, step: Step, reader: int, writer: int) -> int:
        shared = step.op == COMBINE and not self.rules.own_slots
        return self._at(self.slot, step.op, reader, step.epoch) + (reader if shared else writer)

    def _arrived(self, step: Step, rank: int) -> int:
        banks = self.rules.num_banks
        return self.arrived + (step.op * self.ranks + rank) * banks + step.epoch % banks

    def _consumed(self, op: int, rank: int) -> int:
        return self.consumed + (op * self.ranks + rank) * self.ranks


def compile_program(program: list[str], rank: int, ranks: int, rules: Rules) -> list[Step]:
    """The atomic steps of one rank's halves, in order."""
    steps: list[Step] = []
    peers = [(rank + i) % ranks for i in range(1, ranks)]
    received: dict[int, set[int]] = {DISPATCH: set(), COMBINE: set()}
    views: set[int] = set()
    for half in program:
        match = re.fullmatch(r"([DC])([srv])(\d+)", half)
        assert match, half
        op, kind, epoch = "DC".index(match[1]), match[2], int(match[3])
        answers_view = op == COMBINE and kind == "s" and epoch in views
        if answers_view:
            steps += _read_steps(DISPATCH, epoch, peers, rules)
        if kind == "s":
            last = epoch - rules.num_banks
            steps.append(Step("open", op, epoch, value=int(last > 0 and last not in received[op])))
            for peer in peers:
                steps += _send_steps(op, epoch, peer, _writes_row(op, epoch, rank, peer, ranks, rules), rules)
        else:
            steps.append(Step("await", op, epoch))
        if kind == "r":
            steps += _read_steps(op, epoch, peers, rules) + _consume(op, epoch, received[op], peers, rules)
        elif kind == "v":
            views.add(epoch)
        if answers_view:
            steps += _consume(DISPATCH, epoch, received[DISPATCH], peers, rules)
    return steps


def _send_steps(op: int, epoch: int, peer: int, row: bool, rules: Rules) -> list[Step]:
    if not row:
        return [Step("publish", op, epoch, peer)]
    if rules.fused:
        return [Step("send", op, epoch, peer)]
    steps = [Step("write", op, epoch, peer), Step("publish", op, epoch, peer)]
    return steps if rules.data_first else steps[::-1]


def _read_steps(op: int, epoch: int, peers: list[int], rules: Rules) -> list[Step]:
    return [Step("read", op, epoch)] if rules.fused else [Step("read", op, epoch, peer) for peer in peers]


def _consume(op: int, epoch: int, received: set[int], peers: list[int], rules: Rules) -> list[Step]:
    received.add(epoch)
    prefix = next(e for e in range(epoch + 2) if e + 1 not in received)
    return [Step("consume", op, epoch, peer, prefix if rules.prefix else epoch) for peer in peers]


def _writes_row(op: int, epoch: int, writer: int, reader: int, ranks: int, rules: Rules) -> bool:
    """A dispatch brings every peer a row, and so does a combine with slots of its own; where all ranks share
    the slots of a token, one peer alone answers it, and another one when the bank comes round."""
    if op == DISPATCH or rules.own_slots:
        return True
    others = [(reader + i) % ranks for i in range(1, ranks)]
    return others[epoch // rules.num_banks % len(others)] == writer


@cache
def _label(rank: int, step: Step) -> str:
    return f"rank {rank}: {step.kind} {'DC'[step.op]}{step.epoch} peer {step.peer}"


def _path(parents: dict[bytes, tuple[bytes, str] | None], state: bytes) -> list[str]:
    labels = []
    link = parents[state]
    while link is not None:
        labels.append(link[1])
        link = parents[link[0]]
    return labels[::-1]
