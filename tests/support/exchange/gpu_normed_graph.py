"""What ranks on GPUs run in tests of a combine that norms: in a graph, and beside the kernel it replaces."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from ep_server.backends.gpu.kernels.triton.norm import add_rms_norm, rms_norm
from ep_server.exchange.api import AddNorm, Payload, View
from ep_server.exchange.nvlink.exchange import NvlinkExchange
from tests.support.compare import assert_equal
from tests.support.exchange.gpu_group import (
    a_models_spec,
    answer,
    close_exchange,
    factors_of,
    on_gpu,
    open_exchange,
)
from tests.support.exchange.gpu_normed import EPS, layer_end
from tests.support.exchange.gpu_programs import ROUTINGS, Cases, Replayed
from tests.support.exchange.routing import make_inputs

PLACE = 2.0**-7  # the last one of a bfloat16: two sums of squares may round to neighbours


def beside_add_rms_norm(group: dist.ProcessGroup) -> None:
    """A combine and its norm, in two kernels and in one: the same stream, the same norm to the last place."""
    spec = a_models_spec(group.rank(), group.size(), Payload.BF16)
    exchange = open_exchange(group, spec)
    for seed, routing in enumerate(ROUTINGS):
        mine = make_inputs(spec, routing, seed)[spec.rank]
        received = exchange.dispatch(*on_gpu(mine))
        answers = answer(received, factors_of(spec))
        norm = layer_end(len(mine.x), spec.hidden, seed, shared=seed % 2 == 1)
        apart = replace(norm, residual=norm.residual.clone())
        wanted = torch.empty_like(norm.residual)
        sums = exchange.combine(answers, received, next_reads_ahead=True)
        add_rms_norm(sums, apart.residual, norm.weight, EPS, wanted, norm.shared)
        out = exchange.combine(answers, received, add_norm=norm)
        exchange.synchronize()
        assert_equal(norm.residual.cpu(), apart.residual.cpu(), f"{routing}: residual")
        off = (out.float() - wanted.float()).abs() > wanted.float().abs() * PLACE
        assert not off.any(), f"{routing}: {int(off.sum())} elements of the norm"
        other = int((out.view(torch.int16) != wanted.view(torch.int16)).sum())
        assert other <= out.numel() // 50, f"{routing}: {other} of {out.numel()} elements round otherwise"
    close_exchange(exchange)


class NormReplayed(Replayed):
    """The stream is empty before, so it holds combine's sums; its norm is that of the kernel right behind."""

    def __init__(self, exchange: NvlinkExchange, cases: Cases) -> None:
        self.weight = (
            torch.rand(exchange.spec.hidden, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
        )
        super().__init__(exchange, cases, fused=True)

    def operation(self, padded: tuple[torch.Tensor, torch.Tensor | None], out: torch.Tensor) -> torch.Tensor:
        """As Replayed's; out: the stream."""
        out.zero_()
        normed, wanted = torch.full_like(out, torch.nan), torch.empty_like(out)
        given = (self.x, self.ids, self.weights)
        received = self.exchange.dispatch(*given, View.PADDED, out=padded, tokens_on_device=self.tokens)
        answers, norm = answer(received, self.factors), AddNorm(out, self.weight, EPS)
        self.exchange.combine(answers, received, out=normed, add_norm=norm, next_reads_ahead=True)
        rms_norm(out, self.weight, EPS, wanted)
        near = (normed.float() - wanted.float()).abs() <= wanted.float().abs() * PLACE
        self.note((~near & (self.rows < self.tokens)).sum())
        return received.counts


def replays(group: dist.ProcessGroup, count: int) -> None:
    """Replays of a graph, each with another routing and token count."""
    exchange = open_exchange(group, a_models_spec(group.rank(), group.size(), Payload.BF16))
    cases = Cases(exchange.spec, 4 * len(ROUTINGS))
    program = NormReplayed(exchange, cases)
    for _ in range(count):
        program.graph.replay()
    exchange.synchronize()
    assert int(program.step) == count + 1
    step = int(program.first_wrong)
    assert not int(program.wrong), (
        f"{int(program.wrong)} elements, first in replay {step}: {cases.names[step % 28]}"
    )
    close_exchange(exchange)
