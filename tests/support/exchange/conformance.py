"""The conformance suite of the exchange, as functions that run inside one rank of a group.

`run_cases` and `run_sequences` take a factory, so the same code judges every implementation; each returns
{name: failure text or ""}. Expectations are rebuilt locally from seeds (expected.py); equal means equal
bit for bit. Whatever an operation should no longer read is overwritten with NaN at once.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist

from ep_server.exchange.api import Exchange, ExchangeSpec, Payload, Received, Reduction, View
from ep_server.exchange.quant import dequantise
from ep_server.exchange.validate import input_dtype
from tests.support.compare import assert_equal
from tests.support.exchange.expected import Expected, expect, expert
from tests.support.exchange.routing import ROUTINGS, Inputs, make_inputs

Factory = Callable[[ExchangeSpec, dist.ProcessGroup], Exchange]


@dataclass(frozen=True)
class Shape:
    """Sizes of a group. placement: expert -> rank; taken modulo R so that one table serves every R."""

    max_tokens: int
    hidden: int
    top_k: int
    placement: tuple[int, ...]
    num_banks: int = 2

    def spec(self, rank: int, num_ranks: int, payload: Payload, reduction: Reduction) -> ExchangeSpec:
        return ExchangeSpec(
            rank=rank,
            num_ranks=num_ranks,
            placement=tuple(owner % num_ranks for owner in self.placement),
            max_tokens=self.max_tokens,
            hidden=self.hidden,
            top_k=self.top_k,
            payload=payload,
            reduction=reduction,
            num_banks=self.num_banks,
        )


@dataclass(frozen=True)
class Plan:
    """One exchange, its shape, and the routings that run on it back to back, each in every view."""

    name: str
    shape: Shape
    payload: Payload
    reduction: Reduction
    routings: tuple[str, ...] = tuple(ROUTINGS)


UNEVEN = (0, 0, 0, 1, 1, 2, 3)  # 7 experts over 2 or 4 ranks: contiguous, not divisible
SCATTERED = (2, 0, 3, 0, 1, 1, 3, 0, 2)
ONE_RANK_BARE = (0, 2, 2, 0, 3, 0)  # rank 1 of 4 owns nothing
ALL_ON_LAST = (3, 3, 3)  # with R = 2 and 4 every other rank owns nothing

PAYLOAD_SHAPES = {
    Payload.FP32: Shape(5, 33, 3, SCATTERED),
    Payload.BF16: Shape(6, 129, 3, UNEVEN, num_banks=4),
    Payload.FP8: Shape(4, 384, 3, SCATTERED),
    Payload.FP8_POW2: Shape(3, 128, 2, ONE_RANK_BARE, num_banks=4),
    Payload.FP8_UE8M0: Shape(5, 1024, 4, UNEVEN),
}
ODD_SHAPES = {
    "one_choice": Shape(4, 7, 1, UNEVEN),
    "sixteen_choices": Shape(4, 16, 16, tuple(range(4)) * 6),
    "one_slot": Shape(1, 2, 2, UNEVEN),
    "one_expert_each": Shape(5, 65, 2, (3, 2, 1, 0)),
    "more_choices_than_experts": Shape(3, 31, 5, ALL_ON_LAST),
    "one_rank_bare": Shape(4, 2047, 3, ONE_RANK_BARE),
}
FEW_ROUTINGS = ("uniform", "max_tokens", "all_to_one", "dropped", "single_token")


def plans() -> Iterator[Plan]:
    """Every payload with every reduction on its own shape, then the odd shapes in turn."""
    for payload, shape in PAYLOAD_SHAPES.items():
        for reduction in Reduction:
            yield Plan(f"{payload.value}-{reduction.value}", shape, payload, reduction)
    for index, (name, shape) in enumerate(ODD_SHAPES.items()):
        payload = (Payload.BF16, Payload.FP32)[index % 2]
        for reduction in Reduction:
            yield Plan(f"{name}-{reduction.value}", shape, payload, reduction, FEW_ROUTINGS)


def case_names() -> list[str]:
    """Names of all cases, as run_cases reports them."""
    return [f"{p.name}-{routing}-{view.value}" for p in plans() for routing in p.routings for view in View]


def run_cases(
    group: dist.ProcessGroup, factory: Factory, *, instead_of_fp32: Payload = Payload.FP32
) -> dict[str, str]:
    """Runs every case on this rank. The views share an exchange with no barrier in between."""
    results: dict[str, str] = {}
    for plan in plans():
        payload = instead_of_fp32 if plan.payload == Payload.FP32 else plan.payload
        spec = plan.shape.spec(group.rank(), group.size(), payload, plan.reduction)
        exchange = factory(spec, group)
        for seed, routing in enumerate(plan.routings):
            for view in (view for view in View if view in exchange.capabilities.views):
                run = partial(run_pair, exchange, routing, seed, view)
                results[f"{plan.name}-{routing}-{view.value}"] = failure_of(run)
        exchange.barrier()
        exchange.close()
    return results


def failure_of(run: Callable[[], object]) -> str:
    """The traceback of what it raised, or ""."""
    try:
        run()
    except Exception:
        return traceback.format_exc()
    return ""


class Operation:
    """One dispatch, expert and combine, halves called by the scenario; each half checks what it gets."""

    def __init__(self, exchange: Exchange, routing: str, seed: int, view: View) -> None:
        self.exchange, self.view, self.what = exchange, view, f"{routing} seed {seed} {view.value}"
        intra = getattr(exchange, "intra_ranks", ())  # of a HierarchicalExchange, which sums in two parts
        self.inputs, self.expected = _known(exchange.spec, routing, seed, intra)
        mine = self.inputs[exchange.spec.rank]
        # Both ways of giving weights; a caller of DeepEP's form has them only at combine.
        self.late = view is View.PADDED and exchange.spec.reduction is Reduction.SOURCE
        x, ids, weights = mine.x.clone(), mine.ids.clone(), mine.weights.clone()
        self.pending = exchange.dispatch_send(x, ids, None if self.late else weights)
        x.fill_(torch.nan)
        ids.fill_(-1)
        weights.fill_(torch.nan)

    def receive(self) -> Operation:
        """Second half of dispatch."""
        self.received = self.pending.recv(self.view)
        check_received(self.exchange.spec, self.received, self.expected, self.what)
        return self

    def answer(self) -> Operation:
        """Experts, then the first half of combine."""
        spec, mine = self.exchange.spec, self.inputs[self.exchange.spec.rank]
        out = run_experts(spec, self.received)
        weights = mine.weights.clone() if self.late else None
        self.returning = self.exchange.combine_send(out, self.received, weights)
        out.fill_(torch.nan)
        return self

    def finish(self) -> None:
        """Second half of combine; writes into a poisoned tensor where a view has no other use of it."""
        given = torch.full_like(self.expected.combined, torch.nan) if self.view is not View.COMPACT else None
        result = self.returning.recv(given)
        assert given is None or result.data_ptr() == given.data_ptr(), "out was not written in place"
        assert_equal(result, self.expected.combined, f"{self.what}: combined")


def run_pair(exchange: Exchange, routing: str, seed: int, view: View) -> None:
    """A whole dispatch and combine, halves in order."""
    Operation(exchange, routing, seed, view).receive().answer().finish()


@cache
def _known(
    spec: ExchangeSpec, routing: str, seed: int, intra: Collection[int]
) -> tuple[list[Inputs], Expected]:
    inputs = make_inputs(spec, routing, seed)
    return inputs, expect(spec, inputs, intra)


def check_received(spec: ExchangeSpec, received: Received, expected: Expected, what: str) -> None:
    """Asserts counts, order, rows and scales, bit for bit, and the shapes and strides of the view."""
    experts = len(spec.local_experts)
    counts = torch.bincount(
        torch.tensor([e for e, _, _ in expected.entries], dtype=torch.int64), minlength=experts
    )
    assert_equal(received.counts, counts.to(torch.int32), f"{what}: counts")
    assert received.view is View(received.view)
    rows, scales = received.rows, received.scales
    if received.view is View.PADDED:
        capacity = spec.num_ranks * spec.max_tokens
        assert rows.shape == (experts, capacity, spec.hidden), f"{what}: {tuple(rows.shape)}"
        rows = _valid(rows, counts)
        if scales is not None:
            assert scales.stride(1) == 1, f"{what}: scales are not column-major: {scales.stride()}"
            assert scales.shape[:2] == (experts, capacity)
            scales = _valid(scales, counts)
    else:
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        assert_equal(received.offsets, offsets, f"{what}: offsets")
    if received.view is View.INDEX:
        assert received.row_ids is not None
        rows = rows[received.row_ids]
        scales = None if scales is None else scales[received.row_ids]
    assert_equal(rows, expected.rows, f"{what}: rows")
    assert (scales is None) == (expected.scales is None), f"{what}: scales {scales}"
    if scales is not None and expected.scales is not None:
        assert_equal(scales, expected.scales, f"{what}: scales")


def received_float(received: Received) -> torch.Tensor:
    """The rows as float32 values in the same layout, dequantised where they carry scales."""
    if received.scales is None:
        return received.rows.float()
    return dequantise(received.rows, received.scales)


def run_experts(spec: ExchangeSpec, received: Received) -> torch.Tensor:
    """expert_out in the layout of `received`; what no row answers is NaN."""
    values = received_float(received)
    dtype = input_dtype(spec)
    counts = received.counts.tolist()
    if received.view is View.PADDED:
        out = torch.full(values.shape, torch.nan, dtype=dtype)
        for local, (expert_id, count) in enumerate(zip(spec.local_experts, counts, strict=True)):
            out[local, :count] = expert(values[local, :count], expert_id, dtype)
        return out
    if received.row_ids is not None:
        values = values[received.row_ids]
    parts = zip(values.split(counts), spec.local_experts, strict=True)
    answered = [expert(part, expert_id, dtype) for part, expert_id in parts]
    return torch.cat(answered) if answered else torch.empty(0, spec.hidden, dtype=dtype)


def _valid(padded: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    parts = [plane[:count] for plane, count in zip(padded, counts.tolist(), strict=True)]
    return torch.cat(parts) if parts else padded.new_empty(0, padded.shape[-1])


BOTH_REDUCTIONS = ((Payload.BF16, Reduction.RANK), (Payload.FP8, Reduction.SOURCE))


def run_side_by_side(
    group: dist.ProcessGroup,
    one: Factory,
    other: Factory,
    kinds: tuple[tuple[Payload, Reduction], ...] = BOTH_REDUCTIONS,
) -> None:
    """Two implementations at a model's sizes, on the same inputs: the same bits come out."""
    share = tuple(e * group.size() // 64 for e in range(64))
    for payload, reduction in kinds:
        spec = ExchangeSpec(group.rank(), group.size(), share, 32, 2048, 8, payload, reduction, num_banks=2)
        mine = make_inputs(spec, "zipf", 11)[spec.rank]
        made = []
        for factory in (one, other):
            exchange = factory(spec, group)
            received = exchange.dispatch_send(mine.x, mine.ids, mine.weights).recv()
            out = run_experts(spec, received)
            combined = exchange.combine_send(out, received).recv()
            exchange.barrier()
            exchange.close()
            made.append((received.rows, received.scales, received.counts, out, combined))
        for name, a, b in zip(("rows", "scales", "counts", "expert_out", "combined"), *made, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert_equal(a, b, f"{payload} {name}")
