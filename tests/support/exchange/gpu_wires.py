"""What ranks on GPUs run in tests of combine's forms: weights that come late, rows of low precision."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from ep_server.exchange.api import ExchangeSpec, Payload, Reduction, View
from ep_server.exchange.quant import dequantise, quantise
from tests.support.compare import assert_equal, describe
from tests.support.exchange.expected import expect, expert
from tests.support.exchange.gpu_group import a_models_spec, close_exchange, on_gpu, open_exchange, run_experts
from tests.support.exchange.routing import Inputs, make_inputs

# Of a row on the wire, how far an element may be off: relative to itself, and to the largest of its row.
# log10: 511 steps over at most 32 octaves, half of one; fp8: half of 1/8, and half of the smallest number.
STEPS = {"log10": (0.0235, 2.0**-30), "fp8": (0.0635, 5e-6)}
BF16 = 2.0**-8
TIMEOUT_NS = 20_000_000_000
ROUTINGS = ("uniform", "max_tokens", "all_to_one", "dropped", "empty_rank", "zipf")


def small(group: dist.ProcessGroup, payload: Payload, timeout_ns: int) -> ExchangeSpec:
    return replace(a_models_spec(group.rank(), group.size(), payload, tokens=8), timeout_ns=timeout_ns)


def late_weights(group: dist.ProcessGroup, timeout_ns: int = TIMEOUT_NS) -> None:
    """Weights given only at combine, reduced on the experts' ranks: the bits of weights given at dispatch."""
    plain = small(group, Payload.FP8, timeout_ns)
    exchange = open_exchange(group, replace(plain, reduction=Reduction.SOURCE))
    for seed, routing in enumerate(ROUTINGS):
        inputs = make_inputs(plain, routing, seed)
        wanted, (x, ids, weights) = expect(plain, inputs).combined, on_gpu(inputs[plain.rank])
        what = f"{routing} seed {seed}"

        received = exchange.dispatch_send(x, ids, None).recv(View.PADDED)
        answers = run_experts(plain, received)
        pending = exchange.combine_send(answers, received, weights, reduction=Reduction.RANK)
        apart = pending.recv(torch.full_like(x, torch.nan))
        exchange.synchronize()
        assert_equal(apart.cpu(), wanted, f"{what}: halves apart")

        received = exchange.dispatch(x, ids, None)
        answers = run_experts(plain, received)
        fused = exchange.combine(answers, received, weights, reduction=Reduction.RANK)
        again = exchange.combine(answers, received, 2 * weights, reduction=Reduction.RANK)
        exchange.synchronize()
        assert_equal(fused.cpu(), wanted, f"{what}: both halves in one kernel")
        assert_equal(again.cpu(), 2 * wanted, f"{what}: the same dispatch again, twice the weights")

        one_by_one = exchange.combine(answers, received, weights)
        exchange.synchronize()
        by_source = expect(exchange.spec, inputs).combined
        assert_equal(one_by_one.cpu(), by_source, f"{what}: reduced at the source")
    close_exchange(exchange)


def low_precision(group: dist.ProcessGroup, wire: str, timeout_ns: int = TIMEOUT_NS) -> None:
    """Sums of narrow rows are within their step of the float64 sum; apart and fused are the same bits."""
    for form, payload in (("own", Payload.BF16), ("late", Payload.FP8)):
        plain = small(group, payload, timeout_ns)
        late = form == "late"
        exchange = open_exchange(group, plain)
        for seed, routing in enumerate(ROUTINGS):
            mine = make_inputs(plain, routing, seed)[plain.rank]
            x, ids, weights = on_gpu(mine)
            first, second = (None, weights) if late else (weights, None)
            received = exchange.dispatch(x, ids, first)
            answers = run_experts(plain, received)
            fused = exchange.combine(answers, received, second, wire=wire)
            pending = exchange.combine_send(answers, received, second, wire=wire)
            apart = pending.recv(torch.full_like(x, torch.nan))
            exchange.synchronize()
            what = f"{wire}, {form}, {routing} seed {seed}"
            assert_equal(apart.cpu(), fused.cpu(), f"{what}: apart beside fused")
            check_within(fused.cpu(), rank_sums(plain, mine), wire, what)
            nothing = (mine.ids < 0).all(1)
            assert not fused.cpu()[nothing].any(), f"{what}: a token that nobody got is not zero"
        close_exchange(exchange)


def rank_sums(spec: ExchangeSpec, mine: Inputs) -> torch.Tensor:
    """[R, T, H] float64: what each rank owes to each token, rounded nowhere but in the experts' answers."""
    rows = mine.x.float()
    if spec.payload != Payload.BF16:
        rows = dequantise(*quantise(mine.x, spec.payload))
    sums = torch.zeros(spec.num_ranks, *rows.shape, dtype=torch.float64)
    for token, chosen in enumerate(mine.ids.tolist()):
        for k, e in enumerate(chosen):
            if e >= 0:
                answer = expert(rows[token], e, torch.bfloat16).double()
                sums[spec.placement[e], token] += mine.weights[token, k].double() * answer
    return sums


def check_within(got: torch.Tensor, sums: torch.Tensor, wire: str, what: str) -> None:
    """Fails where an element is farther from the sum than the steps of its rows and BF16 allow, or NaN."""
    step, of_row = STEPS[wire]
    wanted, rows = sums.sum(0), sums.abs()
    allowed = (rows * (step + BF16) + rows.amax(-1, keepdim=True) * of_row).sum(0) + wanted.abs() * BF16
    wrong = ~((got.double() - wanted).abs() <= allowed)
    assert not wrong.any(), f"{what}: {int(wrong.sum())} too far off: {describe(got, wanted, wrong)}"
