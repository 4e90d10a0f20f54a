"""What ranks on GPUs run in tests of a combine that adds its sums to the residual stream and norms that."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ep_server.errors import InvalidArgument
from ep_server.exchange.api import AddNorm, ExchangeSpec, Payload, Received, Reduction, View
from ep_server.exchange.nvlink.exchange import NvlinkExchange
from tests.support.compare import assert_equal, describe
from tests.support.exchange.conformance import UNEVEN
from tests.support.exchange.expected import expect
from tests.support.exchange.gpu_group import close_exchange, on_gpu, open_exchange, run_experts, sums_without
from tests.support.exchange.routing import Inputs, make_inputs

EPS, SECOND = 1e-6, 1_000_000_000
HALF = 2.0**-8 * 1.01  # of the last place of a bfloat16, and what float32 sums and roots are off
WIDTHS = (8, 64, 512, 648, 2048, 7168, 9000)
ROUTINGS = ("uniform", "single_token", "nobody", "dropped", "max_tokens", "all_to_one", "empty_rank")


def spec_of(group: dist.ProcessGroup, hidden: int, tokens: int = 5, **more: object) -> ExchangeSpec:
    share = tuple(owner % group.size() for owner in UNEVEN)
    return ExchangeSpec(group.rank(), group.size(), share, tokens, hidden, 3, Payload.BF16, **more)


def layer_end(tokens: int, hidden: int, seed: int, *, shared: bool) -> AddNorm:
    """A residual stream and a norm's weight, on the current GPU."""
    of = torch.Generator().manual_seed(seed)
    residual, more = (torch.randn(tokens, hidden, generator=of).mul(3).bfloat16() for _ in range(2))
    weight = torch.rand(hidden, generator=of).add(0.5).bfloat16()
    return AddNorm(residual.cuda(), weight.cuda(), EPS, more.cuda() if shared else None)


def check_norm(norm: AddNorm, before: torch.Tensor, sums: torch.Tensor, out: torch.Tensor, what: str) -> None:
    """The stream bit for bit, its norm within half of the last place. sums: of a combine that only sums."""
    branch = sums.cpu() if norm.shared is None else sums.cpu() + norm.shared.cpu()
    stream = before.cpu() + branch
    assert_equal(norm.residual.cpu(), stream, f"{what}: residual")
    wide = stream.double()
    wanted = wide / (wide.square().mean(1, keepdim=True) + norm.eps).sqrt() * norm.weight.cpu().double()
    wrong = ~((out.cpu().double() - wanted).abs() <= wanted.abs() * HALF)
    assert not wrong.any(), f"{what}: {describe(out.cpu(), wanted, wrong)}"


def run_normed(
    exchange: NvlinkExchange, answers: torch.Tensor, received: Received, norm: AddNorm
) -> torch.Tensor:
    """`out`, poisoned before."""
    out = torch.full_like(norm.residual, torch.nan)
    assert exchange.combine(answers, received, out=out, add_norm=norm) is out
    exchange.synchronize()
    return out


def widths(group: dist.ProcessGroup) -> None:
    """Every width that a kernel takes and every routing, padded and dropped tokens among them."""
    for hidden in WIDTHS:
        for reduction in Reduction:
            spec = spec_of(group, hidden, reduction=reduction)
            exchange = open_exchange(group, spec)
            for seed, routing in enumerate(ROUTINGS):
                mine = make_inputs(spec, routing, seed)[spec.rank]
                received = exchange.dispatch(*on_gpu(mine))
                answers = run_experts(spec, received)
                sums = exchange.combine(answers, received)
                norm = layer_end(len(mine.x), hidden, seed, shared=seed % 2 == 1)
                before = norm.residual.clone()
                out = run_normed(exchange, answers, received, norm)
                check_norm(norm, before, sums, out, f"H = {hidden}, {reduction}, {routing}")
            close_exchange(exchange)


def many_tokens(group: dist.ProcessGroup) -> None:
    """A block takes many tokens in turn: on one multiprocessor, and with blocks for few; the same bits."""
    spec = spec_of(group, 256, tokens=70)
    outs = []
    for num_sms, most in ((0, None), (1, None), (0, 3)):
        exchange = open_exchange(group, spec, num_sms=num_sms)
        mine = make_inputs(spec, "max_tokens", 1)[spec.rank]
        received = exchange.dispatch(*on_gpu(mine), View.PADDED, most_tokens=most)
        answers = run_experts(spec, received)
        sums = exchange.combine(answers, received)
        norm = layer_end(len(mine.x), spec.hidden, 1, shared=False)
        before = norm.residual.clone()
        outs.append(run_normed(exchange, answers, received, norm).cpu())
        check_norm(norm, before, sums, outs[-1], f"{num_sms} multiprocessors, blocks for {most}")
        assert_equal(outs[-1], outs[0], f"{num_sms} multiprocessors, blocks for {most}: beside all")
        close_exchange(exchange)


def odd_rows(group: dist.ProcessGroup) -> None:
    """NaN and infinity stay with their row; a row of zeros is normed to zeros; fewer tokens than rows."""
    spec = spec_of(group, 512, tokens=8)
    exchange = open_exchange(group, spec)
    mine = make_inputs(spec, "max_tokens", 2)[spec.rank]
    x, ids, weights = on_gpu(mine)
    ids[2:4] = -1
    count = torch.tensor([6], dtype=torch.int32).cuda()
    received = exchange.dispatch(x, ids, weights, View.PADDED, tokens_on_device=count)
    answers = run_experts(spec, received)
    sums = exchange.combine(answers, received, out=torch.zeros_like(x))
    norm = layer_end(len(x), spec.hidden, 3, shared=False)
    norm.residual[0, 7], norm.residual[1, 9], norm.residual[2] = torch.nan, torch.inf, 0.0
    before = norm.residual.clone()
    out = run_normed(exchange, answers, received, norm).cpu()
    assert out[0].isnan().all() and norm.residual.cpu()[0].isnan().sum() == 1
    assert norm.residual.cpu()[1, 9] == torch.inf and out[1, 9].isnan()
    assert not out[2].any(), "a row of zeros"
    assert out[6:].isnan().all(), "rows of no token were written"
    assert_equal(norm.residual.cpu()[6:], before.cpu()[6:], "the stream of no token")
    rest = replace(norm, residual=norm.residual[2:6])
    check_norm(rest, before[2:6], sums[2:6], out[2:6], "the other rows")
    close_exchange(exchange)


def without_one(group: dist.ProcessGroup) -> None:
    """The last rank leaves in the middle, between dispatch and combine, and is masked by deadline."""
    spec = replace(spec_of(group, 512), timeout_ns=SECOND)
    exchange = open_exchange(group, spec, on_timeout="mask")
    inputs, last = make_inputs(spec, "max_tokens", 1), spec.num_ranks - 1
    mine = inputs[spec.rank]
    received = exchange.dispatch(*on_gpu(mine))
    exchange.synchronize()
    if spec.rank != last:
        norm = layer_end(len(mine.x), spec.hidden, 5, shared=False)
        before = norm.residual.clone()
        out = run_normed(exchange, run_experts(spec, received), received, norm)
        check_norm(norm, before, sums_without(spec, inputs, last), out, "without the last rank")
        assert exchange.masked == {last}
    exchange.barrier()
    exchange.reset()
    end_of_layer(exchange, inputs)
    close_exchange(exchange)


def failed(group: dist.ProcessGroup) -> None:
    """The last rank does not come: all threads of a block leave their barriers, the failure is reported."""
    spec = replace(spec_of(group, 2048), timeout_ns=SECOND)
    exchange = open_exchange(group, spec)
    inputs, last = make_inputs(spec, "max_tokens", 1), spec.num_ranks - 1
    mine = inputs[spec.rank]
    received = exchange.dispatch(*on_gpu(mine))
    exchange.synchronize()
    if spec.rank != last:
        norm = layer_end(len(mine.x), spec.hidden, 5, shared=True)
        began = time.monotonic()
        with pytest.raises(Exception, match="rank") as caught:
            run_normed(exchange, run_experts(spec, received), received, norm)
        assert type(caught.value).__name__ in {"PeerTimeout", "GroupAborted"}
        assert time.monotonic() - began < 20
    exchange.barrier()
    exchange.reset()
    end_of_layer(exchange, inputs)
    close_exchange(exchange)


def end_of_layer(exchange: NvlinkExchange, inputs: list[Inputs]) -> None:
    """One dispatch and combine with the sums on paper."""
    spec, mine = exchange.spec, inputs[exchange.spec.rank]
    received = exchange.dispatch(*on_gpu(mine))
    norm = layer_end(len(mine.x), spec.hidden, 6, shared=False)
    before = norm.residual.clone()
    out = run_normed(exchange, run_experts(spec, received), received, norm)
    check_norm(norm, before, expect(spec, inputs).combined, out, "once more")


def refused(group: dist.ProcessGroup) -> None:
    """What the kernel cannot norm is said before anything is sent; can_norm says so too where tensors do."""
    exchange = open_exchange(group, spec_of(group, 512))
    spec = exchange.spec
    mine = make_inputs(spec, "max_tokens", 1)[spec.rank]
    received = exchange.dispatch(*on_gpu(mine))
    answers = run_experts(spec, received)
    good = layer_end(len(mine.x), spec.hidden, 1, shared=True)
    assert exchange.can_norm(good)
    beside = torch.zeros(good.residual.numel() + 1, dtype=torch.bfloat16).cuda()[1:].view(good.residual.shape)
    for field, bad, able in (
        ("residual", good.residual.float(), False),
        ("residual", good.residual[:-1], True),
        ("residual", good.residual.t().contiguous().t(), False),
        ("weight", good.weight.float(), False),
        ("weight", good.weight[:-8], True),
        ("shared", good.shared.float(), False),
        ("", beside, False),
    ):
        norm = replace(good, **{field or "residual": bad})
        assert exchange.can_norm(norm) is able
        with pytest.raises(InvalidArgument, match=f"add_norm.{field}" if field else "multiples of 16 bytes"):
            exchange.combine(answers, received, add_norm=norm)
    with pytest.raises(InvalidArgument, match="wire"):
        exchange.combine(answers, received, wire="fp8", add_norm=good)
    odd = open_exchange(group, spec_of(group, 516, tokens=1))
    assert not odd.can_norm(layer_end(1, 516, 1, shared=False))
    close_exchange(odd)
    sums = exchange.combine(answers, received)
    before = good.residual.clone()
    out = run_normed(exchange, answers, received, good)
    check_norm(good, before, sums, out, "after all that")
    close_exchange(exchange)
