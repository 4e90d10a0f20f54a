"""Which steps use the exchange of many rows: what is measured, what ranks agree on, what late ranks learn."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from ep_server.config import Config
from ep_server.errors import ConfigError
from ep_server.ranks.devices import normal_from
from ep_server.ranks.modes import ALWAYS, NEVER, ExchangeModes, Measurement, ModeRule, measure
from ep_server.ranks.vote import Verdict, Vote, tally
from ep_server.v1 import rank_pb2 as pb

MOST = 1000
RULE = ModeRule(least=16, rounds=3)


def linear(few: tuple[float, float], many: tuple[float, float]):
    """Times that are so much, and so much more for each token."""
    calls = []

    def time_pair(normal: bool, tokens: int) -> int:
        calls.append((normal, tokens))
        fixed, each = many if normal else few
        return int(fixed + each * tokens)

    return time_pair, calls


def alone(record: bytes) -> list[bytes]:
    return [record]


@pytest.mark.parametrize(
    ("few", "many", "begin"),
    [
        ((10, 2), (300, 1), 512),  # equal at 290
        ((10, 2), (20, 1), 16),
        ((10, 2), (5000, 1), NEVER),
        ((10, 1), (10, 1), NEVER),
        ((10, 2), (950, 1), MOST),
    ],
)
def test_they_begin_where_they_are_faster(few, many, begin):
    time_pair, calls = linear(few, many)
    assert measure(Measurement(time_pair, alone, MOST, rule=RULE)) == begin
    assert [size for _, size in calls[:: 2 * RULE.rounds + 2]] == [16, 32, 64, 128, 256, 512, MOST]


def test_a_single_size_at_which_they_win_does_not_count():
    def time_pair(normal: bool, tokens: int) -> int:
        return 50 if normal and tokens in (32, 512, MOST) else 100

    assert measure(Measurement(time_pair, alone, MOST, rule=RULE)) == 512


def test_the_slowest_rank_counts():
    """On the other rank few rows take longer below 256 tokens, and many rows longer than here."""
    here, _ = linear((0, 2), (100, 1))
    there = {16: (500, 20), 32: (500, 20), 64: (500, 20), 128: (500, 600), 256: (0, 1000)}
    sizes = iter(ModeRule(least=16).sizes(MOST))

    def gather(record: bytes) -> list[bytes]:
        few, many = there.get(next(sizes), (0, 0))
        return [record, few.to_bytes(8, "little") + many.to_bytes(8, "little"), b""]

    assert measure(Measurement(here, gather, MOST, rule=RULE)) == 512


def test_outliers_do_not_count():
    count = 0

    def time_pair(normal: bool, tokens: int) -> int:
        nonlocal count
        count += 1
        return 10**9 if count % 8 in (1, 2, 5) else 50 if normal else 100

    assert measure(Measurement(time_pair, alone, MOST, rule=RULE)) == 16


@pytest.mark.parametrize("most", [1, 15, 16, 17, 8192])
def test_sizes(most):
    sizes = ModeRule(least=16).sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    assert all(size >= 16 for size in sizes[:-1])


def verdict_of(*normal_from: int, tokens: int = 64, micro: bool = False) -> Verdict:
    ok = {"has_work": True, "micro_batch_ok": micro}
    return tally([Vote(1, 0, 1, tokens=tokens, normal_from=each, **ok) for each in normal_from])


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ((64, 64), True),
        ((65, 65), False),
        ((64, 65), False),
        ((ALWAYS, ALWAYS), True),
        ((NEVER, NEVER), False),
        ((ALWAYS, NEVER), False),
        ((0, 64), True),
        ((0, 65), False),
        ((0, 0), False),
    ],
)
def test_all_that_know_must_agree(votes, expected):
    assert verdict_of(*votes).normal(bucket=0, micro_batches=1) is expected


def test_the_padded_size_counts_and_that_of_a_micro_batch():
    verdict = verdict_of(100, 100, micro=True)
    assert verdict.normal(128, 1) and not verdict.normal(0, 1) and not verdict.normal(128, 2)
    assert verdict.normal(200, 2)
    assert ExchangeModes(100).chosen(verdict, 200, 2)
    assert not ExchangeModes(100, undivided=True).chosen(verdict, 200, 2)
    assert ExchangeModes(100, undivided=True).chosen(verdict, 200, 1)


def test_a_rank_that_joined_learns_and_passes_it_on():
    late = ExchangeModes(0)
    assert late.possible(8) == late.possible(8192) == (False, True)
    assert late.chosen(verdict_of(0, 64), 0, 1)
    assert late.known == 64 and late.possible(63) == (False,) and late.possible(64) == (True,)
    assert ExchangeModes(late.known).chosen(verdict_of(late.known, 0), 0, 1)


def late_modes(count: int) -> tuple[list[ExchangeModes], list[int]]:
    """Of so many ranks that have not measured, and when each measurement of the first one began."""
    began: list[int] = []

    def begin(rank: int) -> Measurement:
        time_pair, calls = linear((10, 2), (20, 1))
        if rank == 0:
            began.append(len(calls))
        return Measurement(time_pair, alone, 64, rule=RULE)

    return [ExchangeModes(0, late=partial(begin, rank)) for rank in range(count)], began


def voted(ranks: list[ExchangeModes]) -> list[bool]:
    verdict = verdict_of(*(each.known for each in ranks))
    return [each.chosen(verdict, 0, 1) for each in ranks]


def test_ranks_that_do_not_know_measure_between_their_steps():
    """Three sizes, each with a turn to warm up and `rounds` more; until then steps have few rows."""
    ranks, began = late_modes(2)
    for _ in range(3 * (RULE.rounds + 1)):
        assert voted(ranks) == [False, False] and all(each.due for each in ranks)
        for each in ranks:
            each.turn()
    assert voted(ranks) == [True, True] and not any(each.due for each in ranks)
    assert [each.known for each in ranks] == [16, 16] and began == [0]


def test_a_rank_alone_or_beside_one_that_knows_does_not_measure():
    ranks, began = late_modes(1)
    assert voted(ranks) == [False] and not ranks[0].due
    assert voted([*ranks, ExchangeModes(64)]) == [True, True] and not ranks[0].due
    assert ranks[0].known == 64 and began == []


def test_other_ranks_measure_anew():
    ranks, began = late_modes(2)
    for _ in range(5):
        voted(ranks)
        for each in ranks:
            each.turn()
    joined = late_modes(1)[0]
    for each in ranks:
        each.regrouped()
    three = ranks + joined
    turns = 0
    while not all(each.known for each in three):
        voted(three)
        for each in three:
            each.turn()
        turns += 1
    assert turns == 3 * (RULE.rounds + 1) and began == [0, 0]


def test_what_is_counted():
    modes = ExchangeModes(64)
    for tokens in (63, 64, 65):
        modes.chosen(verdict_of(64, tokens=tokens), 0, 1)
    assert modes.counters() == {"normal_steps": 2, "normal_from": 64}
    assert ExchangeModes(NEVER).counters() == {"normal_steps": 0, "normal_from": 0}


def group_of(normal: object, ranks: int = 2) -> SimpleNamespace:
    spec = SimpleNamespace(num_ranks=ranks, max_tokens=64)
    return SimpleNamespace(normal=normal, spec=spec, membership=None, all_gather=alone)


@pytest.mark.parametrize(
    ("mode", "joins", "expected"),
    [
        ("low_latency", False, NEVER),
        ("normal", False, ALWAYS),
        ("normal", True, ALWAYS),
        ("auto", False, 16),
        ("auto", True, 0),
    ],
)
def test_what_a_rank_knows_when_it_starts(mode, joins, expected):
    time_pair, _ = linear((10, 2), (20, 1))
    config, start = Config.from_values({"exchange.mode": mode}), pb.Start(joins=joins)
    group = group_of(object())
    assert normal_from(config, start, group, lambda: Measurement(time_pair, alone, 64)) == expected
    assert normal_from(config, start, group_of(object()), None) == (0 if mode == "auto" else expected)


def test_an_exchange_without_many_rows():
    auto, forced = (Config.from_values({"exchange.mode": mode}) for mode in ("auto", "normal"))
    assert normal_from(auto, pb.Start(), group_of(None), None) == NEVER
    assert normal_from(forced, pb.Start(), group_of(None, ranks=1), None) == NEVER
    with pytest.raises(ConfigError, match=r"exchange\.mode"):
        normal_from(forced, pb.Start(), group_of(None), None)
