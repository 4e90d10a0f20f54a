"""Do the blocks of a receive on a GPU agree whether a rank's header counts, when it is masked meanwhile?

A model of await_headers() and agree() of csrc/exchange/nvlink/await_headers.cuh: two blocks, one peer, its
header and its mask at any moments. Time in ticks; who acts first within a tick is drawn too. Needs no GPU.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

NEVER = 10**6
TICKS = 40


@dataclass(frozen=True)
class Rules:
    """The protocol in ticks, and the ways to break it that the model must notice.

    grace: from when the deciding block knows of the mask to its last look.
    spins: looks at the header from one look for masks to the next; first_look: at most so long after a
      block's start. grace must exceed both.
    asks_when_masked: a block that finds the peer masked at its start asks, instead of leaving it out.
    looks_after: a block that did not have all headers at once looks for masks when it has them.
    """

    grace: int = 4
    spins: int = 3
    first_look: int = 2
    asks_when_masked: bool = True
    looks_after: bool = True


@dataclass
class Block:
    """leads: it decides for those that ask. held: ticks that it waits for other peers first.

    counts: whether the header does; None = not known yet.
    """

    leads: bool
    start: int
    delay: int
    held: int
    rules: Rules
    masked_at_start: bool = False
    asks_since: int = NEVER
    looks: int = 0
    counts: bool | None = None

    def act(self, now: int, header: bool, masked: bool, said: bool | None) -> None:
        """One look, at `now`; said: what the deciding block has said."""
        if now < self.start or self.counts is not None:
            return
        if now == self.start:
            self.masked_at_start = masked
            if masked and not self.rules.asks_when_masked:
                self.counts = False
                return
        if self.asks_since != NEVER:
            self.ask(now, header, said)
        elif self.masked_at_start:
            self.asks_since = now
        elif now >= self.start + self.delay + self.held:
            self.wait(now, header, masked)

    def wait(self, now: int, header: bool, masked: bool) -> None:
        if header:
            slow = self.held > 0 or self.looks >= self.rules.spins
            if slow and masked and self.rules.looks_after:
                self.asks_since = now
            else:
                self.counts = True
            return
        self.looks += 1
        if masked and self.looks % self.rules.spins == 0:
            self.asks_since = now

    def ask(self, now: int, header: bool, said: bool | None) -> None:
        if not self.leads:
            self.counts = said
        elif now >= self.asks_since + self.rules.grace:
            self.counts = header


def run(rules: Rules, choice: random.Random) -> tuple[bool | None, bool | None]:
    """What the deciding block and another one end with."""
    blocks = [
        Block(
            leads,
            choice.randrange(14),
            choice.randint(0, rules.first_look),
            choice.choice((0, choice.randrange(16))),
            rules,
        )
        for leads in (True, False)
    ]
    came, masked = (choice.choice((NEVER, choice.randrange(16))) for _ in range(2))
    came = came if masked != NEVER or came != NEVER else 0
    order = [0, 1, "header", "mask"]
    choice.shuffle(order)
    facts = {"header": False, "mask": False}
    for now in range(TICKS):
        for who in order:
            if who == "header":
                facts["header"] |= now >= came
            elif who == "mask":
                facts["mask"] |= now >= masked
            else:
                blocks[who].act(now, facts["header"], facts["mask"], blocks[0].counts)
    return blocks[0].counts, blocks[1].counts


def disagreements(rules: Rules, runs: int = 30_000) -> int:
    choice = random.Random(7)
    return sum(len(set(run(rules, choice))) > 1 for _ in range(runs))


def test_all_blocks_take_a_header_or_none_does() -> None:
    choice, found = random.Random(7), set()
    for _ in range(30_000):
        leader, other = run(Rules(), choice)
        assert leader is not None and leader == other
        found.add(leader)
    assert found == {True, False}


@pytest.mark.parametrize(
    "broken",
    [{"grace": 0}, {"spins": 9}, {"first_look": 9}, {"asks_when_masked": False}, {"looks_after": False}],
    ids="-".join,
)
def test_the_model_notices_a_broken_rule(broken: dict[str, int]) -> None:
    assert disagreements(replace(Rules(), **broken)) > 0
