"""An explicit-state model of how GPUs give banks back: slots that are emptied, tickets, cells told later.

What protocol_model.py is to the CPUs' protocol; deadlines, masks and deaths are left to it.

Every block of a kernel runs beside every other one; a step is one store, one read with its emptying, or one
look. A slot holds the epoch that wrote it, 0 = empty; one token per rank, whose row goes to every rank.
Tickets are counted as csrc/exchange/nvlink/bookkeeping.cuh does, and a bank's epoch is worked out from
them as there.

Programs are lists of kernels in the order of their launch; "@2" puts one into another stream than the first:
  Ds1 Dr1 Db1    dispatch 1: its send half, its receive half, both in one kernel; Cs1 Cr1 Cb1 for combine 1
  Dv1            the receive half as an in-place view: Cf1 = Cs1 that empties and frees it, R1 = release()
  P              publish()
Sends follow one another, a receive follows its send, a combine its dispatch, as the exchange asks of callers.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

WHOLE = 8  # the share of one kernel in a ticket, in place of 1 << 24
HOUSE, SEND, RECV = 0, 1, 2  # blocks


@dataclass(frozen=True)
class Rules:
    """The protocol, and the ways to break it that the checker must notice.

    waits: a send waits until every rank has read the bank.
    watches: the first block of a send that waits goes on telling what this rank reads meanwhile.
    whole: a bank is read when all blocks of the kernel have ended, not when its first has.
    empties_first: a block empties its slots before it adds its share.
    news: a block tells nothing where another one, which looked later, has told more.
    at_least: a block that starts late may find that the others' rows were all that its peers waited for.
    """

    num_banks: int = 2
    base: int = 0
    waits: bool = True
    watches: bool = True
    whole: bool = True
    empties_first: bool = True
    news: bool = True
    at_least: bool = True


@dataclass
class Outcome:
    """violation: empty, or what broke, with the steps that lead there."""

    violation: str = ""
    trace: list[str] = field(default_factory=list)
    states: int = 0


@dataclass(frozen=True)
class Kernel:
    """after: indices of the kernels that have ended before it starts. epoch: counted from the base."""

    name: str
    op: int
    epoch: int
    blocks: tuple[int, ...]
    after: tuple[int, ...]
    sends: bool
    reads: tuple[int, ...]  # ops whose bank it gives back
    empties: bool  # its receiver empties what it reads
    frees: bool  # empties the slots of a view


def compile_program(program: str, rules: Rules) -> list[Kernel]:
    """The kernels of one rank."""
    kernels: list[Kernel] = []
    last: dict[str, int] = {}  # by stream; "send"; by half
    for at, word in enumerate(program.split()):
        match = re.fullmatch(r"([DCRP])([sbrvf]?)(\d*)(@\d)?", word)
        assert match, word
        op, half, number, stream = match[1], match[2], match[3], match[4] or "@1"
        sends, receives, reads = half in ("s", "b", "f"), half in ("r", "b", "v"), half in ("r", "b")
        before = [stream, f"C{number}" if op + half == "Cr" else f"D{number}"] + ["send"] * sends
        has = {HOUSE: op != "R", SEND: sends or op == "R", RECV: receives}
        frees = half == "f" or op == "R"
        kernels.append(
            Kernel(
                name=word,
                op=int(op == "C"),
                epoch=int(number or 0) + rules.base,
                blocks=tuple(block for block in has if has[block]),
                after=tuple({last[key] for key in before if key in last}),
                sends=sends,
                reads=(0,) * frees + (int(op == "C"),) * reads,
                empties=reads,
                frees=frees,
            )
        )
        last |= {stream: at, op + number: at} | ({"send": at} if sends else {})
    return kernels


class Model:
    """One group, all ranks with the same program. A state is one bytes object.

    Per rank: per kernel the steps that each block has done and what its first block has seen; tickets of
    sends and reads; what is published; cells by (op, bank, reader); slots by (op, bank, source).
    """

    def __init__(self, program: str, ranks: int, rules: Rules) -> None:
        self.ranks, self.rules, self.kernels = ranks, rules, compile_program(program, rules)
        count, self.cells = len(self.kernels), 2 * rules.num_banks
        self.seen = 3 * count
        self.sends = self.seen + count * self.cells
        self.reads = self.sends + 2
        self.published = self.reads + self.cells
        self.told = self.published + self.cells
        self.slots = self.told + self.cells * ranks
        self.size = self.slots + self.cells * ranks

    def start(self) -> bytes:
        """The state before anybody moved."""
        state = bytearray(self.size * self.ranks)
        for rank in range(self.ranks):
            for op in range(2):
                state[rank * self.size + self.sends + op] = self.rules.base * WHOLE
        return bytes(state)

    def explore(self) -> Outcome:
        """Visits every state; stops at the first violation, with its trace."""
        first, outcome = self.start(), Outcome()
        parents: dict[bytes, tuple[bytes, str] | None] = {first: None}
        todo = [first]
        while todo and not outcome.violation:
            state = todo.pop()
            followers = list(self.successors(state))
            if not followers:
                outcome.violation = self._stuck(state)
            for label, following, problem in followers:
                if following not in parents:
                    parents[following] = (state, label)
                    todo.append(following)
                if problem:
                    outcome.violation, state = problem, following
                    break
            if outcome.violation:
                outcome.trace = _path(parents, state)
        outcome.states = len(parents)
        return outcome

    def walk(self, seed: int) -> Outcome:
        """One run in an order drawn from `seed`; for a while one rank moves only where no other can."""
        choice, state, outcome = random.Random(seed), self.start(), Outcome()
        late, until = f"rank {choice.randrange(self.ranks)}:", choice.randrange(200)
        while followers := list(self.successors(state)):
            early = [f for f in followers if not f[0].startswith(late)]
            label, state, problem = choice.choice(early if early and outcome.states < until else followers)
            outcome.trace.append(label)
            outcome.states += 1
            if problem:
                outcome.violation = problem
                return outcome
        outcome.violation = self._stuck(state)
        return outcome

    def successors(self, state: bytes) -> Iterator[tuple[str, bytes, str]]:
        """(label, next state, violation or "") of every step that any block could take now."""
        for rank in range(self.ranks):
            for at, kernel in enumerate(self.kernels):
                if not all(self._ended(state, rank, other) for other in kernel.after):
                    continue
                for block in kernel.blocks:
                    done = state[rank * self.size + 3 * at + block]
                    if done == self._steps(kernel, block) or not self._ready(
                        state, rank, kernel, block, done
                    ):
                        continue
                    following = bytearray(state)
                    problem = self._act(following, rank, at, block)
                    yield f"rank {rank}: {kernel.name} block {block} step {done}", bytes(following), problem

    def _steps(self, kernel: Kernel, block: int) -> int:
        if block == HOUSE:
            return 3 if kernel.sends and self.rules.watches else 2
        return self.ranks + (block == RECV and not self.rules.empties_first)

    def _ended(self, state: bytes, rank: int, at: int) -> bool:
        kernel, pc = self.kernels[at], rank * self.size + 3 * at
        return all(state[pc + block] == self._steps(kernel, block) for block in kernel.blocks)

    def _ready(self, state: bytes, rank: int, kernel: Kernel, block: int, done: int) -> bool:
        mine, cell = rank * self.size, self._cell(kernel.op, kernel.epoch)
        if block == RECV and done < self.ranks:
            return state[mine + self.slots + cell * self.ranks + (rank + 1 + done) % self.ranks] != 0
        if block == HOUSE and done == 2:
            return self._free(state, rank, kernel) or any(self._news(state, rank))
        return not (block == SEND and kernel.sends and done == 0) or self._free(state, rank, kernel)

    def _free(self, state: bytes | bytearray, rank: int, kernel: Kernel) -> bool:
        """Whether a send of this kernel may write."""
        wanted = kernel.epoch - self.rules.num_banks
        if not self.rules.waits or wanted <= self.rules.base:
            return True
        told = rank * self.size + self.told + self._cell(kernel.op, kernel.epoch) * self.ranks
        cells = state[told : told + self.ranks]
        return all(e == wanted or (e > wanted and self.rules.at_least) for e in cells)

    def _news(self, state: bytes, rank: int) -> list[bool]:
        """By (op, bank): whether more was read than told."""
        reads, published = (rank * self.size + start for start in (self.reads, self.published))
        return [state[reads + i] // WHOLE != state[published + i] for i in range(self.cells)]

    def _act(self, state: bytearray, rank: int, at: int, block: int) -> str:
        """One step of a block; returns what it broke, or ""."""
        kernel, mine = self.kernels[at], rank * self.size
        done, last = state[mine + 3 * at + block], self._steps(kernel, block) - 1
        problem = ""
        if done == 0 and kernel.sends and state[mine + self.sends + kernel.op] // WHOLE + 1 != kernel.epoch:
            problem = f"rank {rank}: a block of {kernel.name} takes another epoch"
        if block == HOUSE:
            if not self._keep_house(state, rank, at, done, kernel):
                return problem  # it goes on watching
        elif block == SEND:
            problem = problem or self._send(state, rank, kernel, done)
        else:
            problem = problem or self._receive(state, rank, kernel, done)
        state[mine + 3 * at + block] += 1
        if done == last - (block == RECV and not self.rules.empties_first):
            self._add_share(state, rank, kernel, block)
        return problem

    def _keep_house(self, state: bytearray, rank: int, at: int, done: int, kernel: Kernel) -> bool:
        """Looks, then tells; of a send that waits, both again. Returns whether that was all of it."""
        seen = rank * self.size + self.seen + at * self.cells
        if done != 1:
            if done == 2 and self._free(state, rank, kernel):
                return True
            for i in range(self.cells):
                state[seen + i] = state[rank * self.size + self.reads + i] // WHOLE
            if done == 0:
                return True
        for i in range(self.cells):
            self._tell(state, rank, i, state[seen + i])
        return done == 1

    def _tell(self, state: bytearray, rank: int, cell: int, read: int) -> None:
        banks, published = self.rules.num_banks, rank * self.size + self.published + cell
        if read == state[published] or (read < state[published] and self.rules.news):
            return
        epoch = (self.rules.base + (cell % banks or banks) + (read - 1) * banks) % 256  # unsigned, as there
        for owner in range(self.ranks):
            told = owner * self.size + self.told + cell * self.ranks + rank
            state[told] = max(state[told], epoch)
        state[published] = max(state[published], read)

    def _send(self, state: bytearray, rank: int, kernel: Kernel, done: int) -> str:
        if kernel.frees and done == 0:
            self._empty(state, rank, self._cell(0, kernel.epoch))
        if not kernel.sends:
            return ""
        reader = (rank + 1 + done) % self.ranks
        slot = reader * self.size + self.slots + self._cell(kernel.op, kernel.epoch) * self.ranks + rank
        old, state[slot] = state[slot], kernel.epoch
        return f"rank {rank}: {kernel.name} overwrites epoch {old} at rank {reader}" if old else ""

    def _receive(self, state: bytearray, rank: int, kernel: Kernel, done: int) -> str:
        cell, first = self._cell(kernel.op, kernel.epoch), self.rules.empties_first
        if done == self.ranks:
            self._empty(state, rank, cell)
            return ""
        slot = rank * self.size + self.slots + cell * self.ranks + (rank + 1 + done) % self.ranks
        found = state[slot]
        if kernel.empties and first:
            state[slot] = 0
        return "" if found == kernel.epoch else f"rank {rank}: {kernel.name} finds epoch {found}"

    def _empty(self, state: bytearray, rank: int, cell: int) -> None:
        slot = rank * self.size + self.slots + cell * self.ranks
        state[slot : slot + self.ranks] = bytes(self.ranks)

    def _add_share(self, state: bytearray, rank: int, kernel: Kernel, block: int) -> None:
        first, mine = block == kernel.blocks[0], rank * self.size
        share = WHOLE - (len(kernel.blocks) - 1) if first else 1
        if kernel.sends:
            state[mine + self.sends + kernel.op] += share
        for op in kernel.reads:
            counted = share if self.rules.whole else WHOLE * first
            state[mine + self.reads + self._cell(op, kernel.epoch)] += counted

    def _cell(self, op: int, epoch: int) -> int:
        return op * self.rules.num_banks + epoch % self.rules.num_banks

    def _stuck(self, state: bytes) -> str:
        """Why a state without successors is not the end, or ""."""
        waiting = [
            f"rank {rank}: {kernel.name}"
            for rank in range(self.ranks)
            for at, kernel in enumerate(self.kernels)
            if not self._ended(state, rank, at)
        ]
        return f"deadlock: {', '.join(waiting)}" if waiting else ""


def _path(parents: dict[bytes, tuple[bytes, str] | None], state: bytes) -> list[str]:
    labels = []
    link = parents.get(state)
    while link is not None:
        labels.append(link[1])
        link = parents[link[0]]
    return labels[::-1]
