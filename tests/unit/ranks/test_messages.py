"""Records survive the way over a channel unchanged, whatever their fields hold."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep_server import errors
from ep_server.orders import (
    DropChange,
    FlushCache,
    OrderDone,
    PrepareWeights,
    RankOrder,
    StartProfile,
    StopProfile,
    SwitchChange,
)
from ep_server.ranks import messages
from ep_server.ranks.order_messages import order_done_message, order_done_of, order_message, order_of
from ep_server.records import (
    SCORES_PER_MESSAGE,
    FinishReason,
    PromptLogprobs,
    RankLoad,
    RankReady,
    RankStatistics,
    Request,
    Sampling,
    StepTrace,
    Stopping,
    TokenEvent,
)
from ep_server.v1 import rank_pb2 as pb
from tests.support.ranks.rank_group import joined

ids = st.integers(0, 2**31 - 1)
counts = st.integers(0, 2**62)
reals = st.floats(allow_nan=False, allow_infinity=False)
logprobs = st.floats(max_value=0.0, allow_nan=False)  # -inf: a token that a filter excludes
names = st.text(min_size=1, max_size=12)

samplings = st.builds(
    Sampling,
    temperature=reals,
    top_k=ids,
    top_p=reals,
    min_p=reals,
    seed=st.none() | st.integers(0, 2**64 - 1),
    repetition_penalty=reals,
    presence_penalty=reals,
    frequency_penalty=reals,
    logit_bias=st.lists(st.tuples(ids, reals), max_size=4).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    allowed_token_ids=st.lists(ids, max_size=4, unique=True).map(tuple),
)
stoppings = st.builds(
    Stopping,
    max_new_tokens=ids,
    min_new_tokens=ids,
    eos_token_ids=st.frozensets(ids, max_size=3),
    stop_token_ids=st.frozensets(ids, max_size=3),
    stop_strings=st.lists(st.text(max_size=5), max_size=3).map(tuple),
    include_stop=st.booleans(),
)
requests = st.builds(
    Request,
    request_id=st.text(max_size=10),
    number=counts,
    prompt_ids=st.lists(ids, max_size=20).map(tuple),
    sampling=samplings,
    stopping=stoppings,
    priority=st.integers(-(2**31), 2**31 - 1),
    cache_salt=st.text(max_size=5),
    bypass_prefix_cache=st.booleans(),
    dp_rank=st.none() | st.integers(0, 63),
    group=counts,
)
events = st.builds(
    TokenEvent,
    number=counts,
    token_id=ids,
    logprob=st.none() | logprobs,
    top=st.lists(st.tuples(ids, logprobs), max_size=3).map(tuple),
    finish=st.none() | st.sampled_from(FinishReason),
    cached_tokens=ids,
    queued_ns=counts,
)
STEP_FIELDS = tuple(StepTrace.__dataclass_fields__)
STEP = {name: ids if name in ("tokens", "sequences", "micro_batches") else counts for name in STEP_FIELDS}
statistics = st.builds(
    RankStatistics,
    rank=st.integers(0, 63),
    load=st.builds(RankLoad, **dict.fromkeys(RankLoad.__dataclass_fields__, counts)),
    histograms=st.dictionaries(names, st.lists(counts, max_size=5).map(tuple), max_size=4),
    sums=st.dictionaries(names, counts, max_size=4),
    counters=st.dictionaries(names, counts, max_size=4),
    peer_wait_ns=st.dictionaries(st.tuples(names, st.integers(0, 63)), counts, max_size=4),
    expert_tokens=st.dictionaries(st.integers(0, 511), counts, max_size=4),
    last_steps=st.lists(st.builds(StepTrace, **STEP), max_size=3).map(tuple),
)


def over_wire(message):
    return type(message).FromString(message.SerializeToString())


@given(request=requests, work_number=counts)
def test_request(request: Request, work_number: int) -> None:
    add = over_wire(messages.add_message(request, work_number)).add
    assert messages.request_of(add.request) == request
    assert add.work_number == work_number


@given(batch=st.lists(events, max_size=6), step=counts, weights=ids)
def test_tokens(batch: list[TokenEvent], step: int, weights: int) -> None:
    sent = over_wire(messages.tokens_message(batch, step, weights)).tokens
    assert messages.events_of(sent) == [event._replace(step=step, weights=weights) for event in batch]


@pytest.mark.parametrize(
    "order",
    [
        FlushCache(),
        StartProfile("p", 3),
        StopProfile(),
        PrepareWeights(5, 2, "/new weights", "stamp:digest"),
        SwitchChange(5),
        DropChange(5),
    ],
)
def test_orders(order: RankOrder) -> None:
    sent = over_wire(order_message(order, 7, 9)).order
    assert (order_of(sent), sent.number, sent.work_number) == (order, 7, 9)


def test_answers_to_orders() -> None:
    done = OrderDone(3, "why", 4, ("a", "b"), nbytes=2**40, rate=1.5, seconds=0.25)
    assert order_done_of(over_wire(order_done_message(done)).order_done) == done


@pytest.mark.parametrize("top", [0, 2])
def test_prompt_logprobs_travel_in_bounded_parts(top: int) -> None:
    count = 2 * SCORES_PER_MESSAGE + 3
    values = [-n / 4 for n in range(count * top)]
    scored = PromptLogprobs(7, 5, [-n / 2 for n in range(count)], range(count * top), values)
    parts = [
        messages.prompt_logprobs_of(over_wire(messages.prompt_logprobs_message(part)).prompt_logprobs)
        for part in scored.parts()
    ]
    assert [len(part.logprobs) for part in parts] == [SCORES_PER_MESSAGE] * 2 + [3]
    assert joined([replace(part, start=part.start - 4) for part in parts]) == replace(
        scored, start=1, top_ids=list(scored.top_ids)
    )


def test_plain_tokens_carry_two_columns() -> None:
    batch = [TokenEvent(number, 5) for number in range(32)]
    tokens = messages.tokens_message(batch, 0).tokens
    assert {field.name for field, _ in tokens.ListFields()} == {"numbers", "token_ids"}


@given(record=statistics)
def test_statistics(record: RankStatistics) -> None:
    assert messages.statistics_of(over_wire(messages.statistics_message(record)).statistics) == record


def test_ready() -> None:
    ready = RankReady(3, 4711, 2**33, 16, 2**41, 2**40, 2**35, 1.25, "triton (as asked)")
    assert messages.ready_of(over_wire(messages.ready_message(ready)).ready) == ready


def fatal_of(error: BaseException) -> errors.EpServerError:
    return messages.error_of(over_wire(messages.fatal_message(error)).fatal)


@pytest.mark.parametrize(
    "kind", [errors.StartupError, errors.CheckpointError, errors.GroupAborted, errors.InternalError]
)
def test_an_error_of_ours_keeps_its_class(kind: type[errors.EpServerError]) -> None:
    error = fatal_of(kind("line one\n  line two"))
    assert type(error) is kind
    assert str(error) == "line one line two"


@pytest.mark.parametrize("value", [7, 0.25, "fp4", None, True])
def test_a_config_error_keeps_its_parts(value: object) -> None:
    before = errors.ConfigError("exchange.payload", value, "one of bf16, fp8")
    error = fatal_of(before)
    assert isinstance(error, errors.ConfigError)
    assert (str(error), error.field, error.value) == (str(before), before.field, value)


def test_an_error_with_parts_of_its_own_keeps_its_text() -> None:
    before = errors.PeerTimeout("dispatch", "recv_header", 1, 2, 9, 8)
    error = fatal_of(before)
    assert type(error) is errors.InternalError
    assert str(error) == str(before)


def test_any_other_exception_is_a_bug_that_names_its_class() -> None:
    error = fatal_of(KeyError("x"))
    assert type(error) is errors.InternalError
    assert str(error) == "KeyError: 'x'"


def test_an_unknown_class_is_an_internal_error() -> None:
    for name in ("NoSuchError", "annotations", "FieldError", ""):
        assert type(messages.error_of(pb.Fatal(error_class=name, message="m"))) is errors.InternalError


def test_one_line_is_never_empty() -> None:
    assert messages.one_line(ValueError()) == "ValueError"
    assert messages.one_line(ValueError(" a \n b ")) == "a b"


def test_minus_infinity_is_not_taken_for_absent() -> None:
    batch = [TokenEvent(1, 2, -math.inf), TokenEvent(2, 3, None)]
    assert messages.events_of(messages.tokens_message(batch, 0).tokens) == batch
