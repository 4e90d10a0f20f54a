"""One suite for every implementation of the exchange: each must return the bits that paper arithmetic gives.

Both implementations are held to the same expected bits, so they are identical to one another. A test is one
group of processes that runs all cases; a failure names the first of those that failed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ep_server.compat.deep_ep.bootstrap import from_process_group
from ep_server.errors import ConfigError, InvalidArgument
from ep_server.exchange.api import (
    Exchange,
    ExchangeSpec,
    Payload,
    PendingCombine,
    PendingDispatch,
    Received,
    Reduction,
    View,
)
from ep_server.testing.reference_exchange import ReferenceExchange
from tests.support.exchange.conformance import (
    PAYLOAD_SHAPES,
    Factory,
    Operation,
    run_cases,
    run_pair,
    run_side_by_side,
)
from tests.support.exchange.process_group import run_group
from tests.support.exchange.sequences import run_sequences
from tests.support.exchange.single import make_single
from tests.support.fabric.suites import failures

IMPLEMENTATIONS = ("reference", "native")
INDEX = f"-{View.INDEX.value}"
SHAPE = PAYLOAD_SHAPES[Payload.FP32]
RANKS = (1, 2, 4)


def _factory(implementation: str) -> Factory:
    if implementation == "reference":
        return _reference
    return _native


def _native(spec: ExchangeSpec, group: dist.ProcessGroup) -> Exchange:
    return from_process_group(group, spec)


def normal(exchange: Exchange) -> Exchange:
    """Its exchange of many rows."""
    assert exchange.normal is not None
    return exchange.normal


def _normal(spec: ExchangeSpec, group: dist.ProcessGroup) -> Exchange:
    return normal(_native(spec, group))


def _reference(spec: ExchangeSpec, group: dist.ProcessGroup) -> Exchange:
    return ReferenceExchange(spec, group if spec.num_ranks > 1 else None)


def _run_rank(group: dist.ProcessGroup, implementation: str) -> dict[str, str]:
    factory = _factory(implementation)
    return run_cases(group, factory) | run_sequences(group, factory)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_case_and_sequence(implementation: str, num_ranks: int) -> None:
    found = failures(run_group(_run_rank, num_ranks, args=(implementation,)))
    assert not found, found


def _run_normal(group: dist.ProcessGroup) -> dict[str, str]:
    return run_cases(group, _normal) | run_sequences(group, _normal)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_exchange_of_many_rows(num_ranks: int) -> None:
    found = failures(run_group(_run_normal, num_ranks), without=INDEX)
    assert not found, found


def _take_turns(group: dist.ProcessGroup) -> None:
    for reduction in Reduction:
        few = _native(SHAPE.spec(group.rank(), 2, Payload.FP32, reduction), group)
        many = normal(few)
        for seed, routing in enumerate(("uniform", "all_to_one", "nobody", "max_tokens", "dropped")):
            for exchange in (few, many, many, few):
                run_pair(exchange, routing, seed, View.COMPACT)
        a, b = Operation(many, "uniform", 1, View.COMPACT), Operation(many, "zipf", 2, View.PADDED)
        a.receive().answer().finish()
        b.receive().answer().finish()
        mine = a.inputs[group.rank()]
        received = few.dispatch_send(mine.x, mine.ids, mine.weights).recv()
        with pytest.raises(InvalidArgument, match="handle"):
            many.combine_send(received.rows.clone(), received)
        few.close()


def test_operations_of_few_and_many_rows_take_turns() -> None:
    run_group(_take_turns, 2)


def _a_rank_alone(group: dist.ProcessGroup) -> None:
    exchange = _native(SHAPE.spec(0, 1, Payload.FP32, Reduction.RANK), group)
    assert exchange.normal is None
    exchange.close()


def test_a_rank_without_peers_has_no_exchange_of_many_rows() -> None:
    run_group(_a_rank_alone, 1)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_native_equals_reference_at_a_models_sizes(num_ranks: int) -> None:
    run_group(run_side_by_side, num_ranks, args=(_reference, _native))


WRONG_FIELDS = [
    ("rank", 1),
    ("rank", -1),
    ("num_ranks", 0),
    ("placement", ()),
    ("placement", (0, 1)),
    ("placement", (0, -1)),
    ("max_tokens", 0),
    ("hidden", 0),
    ("hidden", 640),
    ("top_k", 0),
    ("top_k", 17),
    ("num_banks", 1),
    ("num_banks", 6),
    ("timeout_ns", 0),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("field", "value"), WRONG_FIELDS)
def test_a_spec_out_of_range_names_its_field(implementation: str, field: str, value: object) -> None:
    good = ExchangeSpec(0, 1, (0, 0), 4, 512, 2, payload=Payload.FP8_UE8M0)
    with pytest.raises(ConfigError) as caught:
        make_single(replace(good, **{field: value}), implementation)
    assert field in caught.value.field


class Wrong(ReferenceExchange):
    """The reference with one mistake, to see that the suite notices it."""

    def __init__(self, spec: ExchangeSpec, mistake: str) -> None:
        super().__init__(spec)
        self.mistake = mistake

    def dispatch_send(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> PendingDispatch:
        pending = super().dispatch_send(x, topk_ids, topk_weights)
        gathered = pending._receive.__self__  # a ReferenceDispatch
        if self.mistake == "a row is another token's" and len(x) > 1:
            gathered._rows[0, 0] = gathered._rows[0, 1]
        if self.mistake == "a choice is lost" and len(x):
            gathered._ids[0, 0, 0] = -1
        if self.mistake == "a weight is another choice's" and gathered._weights is not None:
            gathered._weights[:, :, 0] = gathered._weights[:, :, 1]
        if self.mistake == "a scale is off by one bit" and gathered._scales is not None:
            gathered._scales.view(torch.int32)[...] ^= 1
        return pending

    def combine_send(
        self, expert_out: torch.Tensor, received: Received, topk_weights: torch.Tensor | None = None
    ) -> PendingCombine:
        pending = super().combine_send(expert_out, received, topk_weights)
        returned = pending._receive.__self__  # a ReferenceCombine
        if self.mistake == "an answer is off by one bit" and returned._answers.numel():
            returned._answers.view(torch.int16)[..., 2] ^= 1
        if self.mistake == "a zero is not quite zero":
            returned._answers[...] = torch.where(returned._answers == 0, 1e-40, returned._answers)
        return pending


MISTAKES = {
    "a row is another token's": Payload.BF16,
    "a choice is lost": Payload.BF16,
    "a weight is another choice's": Payload.BF16,
    "a scale is off by one bit": Payload.FP8,
    "an answer is off by one bit": Payload.BF16,
    "a zero is not quite zero": Payload.FP32,
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("view", list(View))
def test_the_suite_notices_a_mistake(mistake: str, view: View) -> None:
    spec = ExchangeSpec(0, 1, (0,) * 5, 6, 128, 3, payload=MISTAKES[mistake])
    run_pair(ReferenceExchange(spec), "max_tokens", 1, view)
    with pytest.raises(AssertionError):
        run_pair(Wrong(spec, mistake), "max_tokens", 1, view)
