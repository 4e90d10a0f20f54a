"""What the rank scheduler refuses, and what its checks notice."""

from __future__ import annotations

import pytest

from ep_server.errors import ConfigError, ContextLengthExceeded, InternalError, InvalidArgument
from ep_server.records import RankLoad, SampledToken, StepBatch
from tests.support.ranks.simulated_rank import make_request, small_rank, stream_alone


def test_a_request_that_never_fits_is_refused_with_the_numbers():
    rank = small_rank(kv_blocks=4, block_size=4, max_context=20)
    rank.add(make_request(1, range(10), max_new=7))  # 16 places: exactly 4 blocks
    with pytest.raises(
        ContextLengthExceeded, match=r"10 \+ max_new_tokens 8 .* need 5 KV blocks of 4 tokens; a rank has 4"
    ):
        rank.add(make_request(2, range(10), max_new=8))
    with pytest.raises(ContextLengthExceeded, match=r"10 \+ max_new_tokens 11 .* the context of 20"):
        rank.add(make_request(2, range(10), max_new=11))
    rank.finish_all()
    assert rank.stream(1) == stream_alone(rank.requests[1])


@pytest.mark.parametrize(
    ("prompt", "fields", "field"),
    [
        ((), {}, "prompt_ids"),
        ((1,), {"max_new": 0}, "max_new_tokens = 0"),
        ((1,), {"max_new": 3, "min_new": 4}, "min_new_tokens = 4: must be 0 to max_new_tokens"),
        ((1,), {"min_new": -1}, "min_new_tokens = -1"),
    ],
)
def test_bad_requests_name_their_field(prompt, fields, field):
    with pytest.raises(InvalidArgument, match=field):
        small_rank().add(make_request(1, prompt, **fields))


def test_misuse_is_an_internal_error_and_changes_nothing():
    rank = small_rank()
    rank.add(make_request(1, range(3)))
    with pytest.raises(InternalError, match="number 1 is already"):
        rank.add(make_request(1, range(3)))
    batch = rank.scheduler.plan()
    with pytest.raises(InternalError, match="before the last batch was committed"):
        rank.scheduler.plan()
    with pytest.raises(InternalError, match="not in flight"):
        rank.scheduler.commit(StepBatch(batch.slices, batch.num_tokens), [])
    for wrong in ([], [SampledToken(2, 0)], [SampledToken(1, 0)] * 2):
        with pytest.raises(InternalError, match=r"awaited for \[1\]"):
            rank.scheduler.commit(batch, wrong)
    rank.finish(batch, rank.run(batch))
    rank.finish_all()
    assert rank.stream(1) == stream_alone(rank.requests[1])


@pytest.mark.parametrize(
    "field", ["max_running", "max_step_tokens", "block_size", "kv_blocks", "max_context", "max_overtakes"]
)
def test_limits_are_checked(field):
    with pytest.raises(ConfigError, match=f"scheduler.{field} = 0: must be at least 1"):
        small_rank(**{field: 0})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s._live.pop(1),
        lambda s: s._decoding.append(s._decoding[0]),
        lambda s: s._decoding[0].blocks.pop(),
        lambda s: setattr(s._decoding[0], "capacity", 99),
        lambda s: setattr(s._decoding[0], "computed", 0),
        lambda s: s._decoding[0].tokens.append(0),
        lambda s: s._waiting._by_order.reverse(),
        lambda s: s._waiting._by_arrival.pop(),
        lambda s: s._waiting.push(s._decoding[0]),
    ],
)
def test_check_integrity_notices(spoil):
    rank = small_rank(max_running=1)
    for number in (1, 2, 3):
        rank.add(make_request(number, range(3)))
    rank.step()
    rank.scheduler.check_integrity()
    spoil(rank.scheduler)
    with pytest.raises(InternalError):
        rank.scheduler.check_integrity()


def test_load_and_repr_count():
    rank = small_rank(max_running=1)
    for number in (1, 2):
        rank.add(make_request(number, range(5)))
    rank.step()
    assert rank.scheduler.load() == RankLoad(1, 1, 2, 32, 0, 1, 0, 0, 0)
    assert repr(rank.scheduler) == (
        "RankScheduler(decoding=1, prefilling=0, waiting=1, BlockLedger(used=2, cached=0, total=32))"
    )
