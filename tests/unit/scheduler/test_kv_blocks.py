"""The block ledger against a model that recounts everything, and its prefix index by example."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from ep_server.errors import InternalError
from ep_server.scheduler.kv_blocks import BlockLedger, block_digests, root_digest
from ep_server.scheduler.kv_events import Prefix


def chain(salt: str, *blocks: tuple[int, ...]) -> list[bytes]:
    digests = [root_digest(salt)]
    for tokens in blocks:
        digests += block_digests(digests[-1], tokens, len(tokens))
    return digests[1:]


def table_of(ledger: BlockLedger, count: int, digests=()) -> list[int]:
    table: list[int] = []
    ledger.allocate(table, [], count)
    for block, digest in zip(table, digests, strict=False):
        ledger.seal(block, Prefix(digest))
    return table


def test_a_digest_names_tokens_position_and_salt():
    assert chain("", (1, 2), (3, 4)) == chain("", (1, 2), (3, 4))
    different = {
        *chain("", (1, 2), (3, 4)),
        *chain("x", (1, 2), (3, 4)),
        *chain("", (3, 4)),
        *chain("", (2, 1)),
        *chain("", (1, 2, 3)),
        *chain("", (1, 2), (3, 4, 0)),
        *chain("", (1, 2), (3, 2**31)),
    }
    assert len(different) == 2 + 2 + 1 + 1 + 1 + 1 + 1


def test_released_sealed_blocks_are_found_again_and_shared():
    ledger = BlockLedger(4, 2)
    digests = chain("", (1, 2), (3, 4))
    table = table_of(ledger, 3, digests)
    first, second, _ = table
    ledger.release(table)
    assert table == [] and (ledger.used, ledger.cached, ledger.available) == (0, 2, 4)
    assert ledger.match(digests) == [first, second]
    assert ledger.match(chain("other", (1, 2))) == []
    one: list[int] = []
    two: list[int] = []
    ledger.allocate(one, ledger.match(digests), 1)
    ledger.allocate(two, ledger.match(digests), 1)
    assert one[:2] == two[:2] == [first, second] and one[2] != two[2]
    assert (ledger.used, ledger.cached, ledger.available) == (4, 0, 0)
    ledger.check_integrity([one, two])
    ledger.release(one)
    assert (ledger.used, ledger.available) == (3, 1)
    ledger.check_integrity([two])


def test_tails_and_the_least_recently_used_are_evicted_first():
    ledger = BlockLedger(4, 1)
    old, new = chain("old", (1,), (2,)), chain("new", (1,), (2,))
    old_table, new_table = table_of(ledger, 2, old), table_of(ledger, 2, new)
    ledger.release(old_table)
    ledger.release(new_table)
    fresh: list[int] = []
    for expected in [(1, 2), (0, 2), (0, 1), (0, 0)]:
        ledger.append(fresh)
        assert (len(ledger.match(old)), len(ledger.match(new))) == expected
        ledger.check_integrity([fresh])
    with pytest.raises(InternalError, match="no block available"):
        ledger.append(fresh)


def test_free_blocks_are_taken_before_cached_ones():
    ledger = BlockLedger(2, 1)
    digests = chain("", (1,))
    table = table_of(ledger, 1, digests)
    ledger.release(table)
    ledger.append(table)
    assert len(ledger.match(digests)) == 1


def test_equal_blocks_computed_twice_keep_the_first():
    ledger = BlockLedger(2, 1)
    digests = chain("", (1,))
    one, two = table_of(ledger, 1, digests), table_of(ledger, 1, digests)
    assert ledger.match(digests) == one
    ledger.release(two)
    assert (ledger.used, ledger.cached) == (1, 0)
    ledger.check_integrity([one])


def test_revived_shared_blocks_count_against_free_room():
    ledger = BlockLedger(2, 1)
    digests = chain("", (1,))
    ledger.release(table_of(ledger, 1, digests))
    shared = ledger.match(digests)
    assert ledger.fits(shared, 1) and not ledger.fits(shared, 2)
    table: list[int] = []
    with pytest.raises(InternalError, match="1 shared \\+ 2 fresh"):
        ledger.allocate(table, shared, 2)
    assert table == [] and ledger.cached == 1
    ledger.check_integrity([])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda ledger, table: table.append(table[0]),
        lambda ledger, table: table.pop(),
        lambda ledger, table: ledger._free.append(ledger._free[0]),
        lambda ledger, table: ledger._free.pop(),
        lambda ledger, table: ledger._references.__setitem__(table[0], 2),
        lambda ledger, table: ledger._block_of.__setitem__(b"?" * 16, table[1]),
        lambda ledger, table: ledger._prefix_of.__setitem__(table[1], Prefix(b"?" * 16)),
        lambda ledger, table: ledger._cached.__setitem__(table[0], None),
        lambda ledger, table: ledger._cached.__setitem__(ledger._free.pop(), None),
    ],
)
def test_check_integrity_notices(spoil):
    ledger = BlockLedger(4, 1)
    table = table_of(ledger, 2, chain("", (1,)))
    ledger.check_integrity([table])
    spoil(ledger, table)
    with pytest.raises(InternalError):
        ledger.check_integrity([table])


class LedgerMachine(RuleBasedStateMachine):
    """Random tables over a small ledger; the contents of sealed blocks are remembered and compared."""

    tables = Bundle("tables")

    def __init__(self):
        super().__init__()
        self.ledger = BlockLedger(6, 2)
        self.live: list[list[int]] = []
        self.sealed: dict[int, bytes] = {}  # block -> digest it was last sealed with

    def _taken(self, blocks):
        for block in blocks:
            self.sealed.pop(block, None)

    @rule(target=tables, salt=st.sampled_from("ab"), tokens=st.lists(st.integers(0, 1), max_size=8))
    def allocate(self, salt, tokens):
        pairs = [tuple(tokens[i : i + 2]) for i in range(0, len(tokens) - 1, 2)]
        digests = chain(salt, *pairs)
        shared = self.ledger.match(digests)
        assert [self.sealed[block] for block in shared] == digests[: len(shared)]
        table: list[int] = []
        fresh = len(pairs) - len(shared) + 1
        revived = [b for b in shared if not any(b in other for other in self.live)]
        room = 6 - len({b for other in self.live for b in other})
        assert self.ledger.fits(shared, fresh) == (fresh + len(revived) <= room)
        if not self.ledger.fits(shared, fresh):
            return table
        self.ledger.allocate(table, shared, fresh)
        self._taken(table[len(shared) :])
        self.live.append(table)
        for block, digest in zip(table, digests, strict=False):
            known = self.ledger.match(digests)
            self.ledger.seal(block, Prefix(digest))
            if block not in known and digest not in self.sealed.values():
                self.sealed[block] = digest
        return table

    @rule(table=tables)
    def append(self, table):
        if any(table is other for other in self.live) and self.ledger.available:
            self.ledger.append(table)
            self._taken(table[-1:])

    @rule(table=consumes(tables))
    def release(self, table):
        self.live = [other for other in self.live if other is not table]
        self.ledger.release(table)

    @rule()
    def forget_all(self):
        found = {digest for block, digest in self.sealed.items() if self.ledger.match([digest]) == [block]}
        assert self.ledger.forget_all() == len(found) and self.ledger.cached == 0
        self.sealed.clear()

    @invariant()
    def consistent(self):
        self.ledger.check_integrity(self.live)
        assert self.ledger.used == len({block for table in self.live for block in table})


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestLedgerMachine = LedgerMachine.TestCase
