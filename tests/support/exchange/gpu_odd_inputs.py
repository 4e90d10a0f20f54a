"""What ranks on GPUs run with inputs that no router makes: an expert twice in a token, values not finite."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from ep_server.errors import GroupAborted, InvalidArgument
from ep_server.exchange.api import Payload, View
from ep_server.exchange.nvlink.exchange import NvlinkExchange
from ep_server.exchange.quant import dequantise
from tests.support.compare import assert_equal
from tests.support.exchange.conformance import run_pair
from tests.support.exchange.expected import expect
from tests.support.exchange.gpu_group import a_models_spec, close_exchange, on_gpu, open_exchange
from tests.support.exchange.on_gpu import OnGpu
from tests.support.exchange.routing import make_inputs

SECOND = 1_000_000_000
GUARD = 0x5A


def an_expert_twice(group: dist.ProcessGroup) -> None:
    """Every token of rank 0 chooses one expert K times: refused by name, nothing is written out of bounds."""
    for payload, view in (
        (Payload.BF16, View.PADDED),
        (Payload.FP8, View.PADDED),
        (Payload.BF16, View.COMPACT),
    ):
        spec = replace(a_models_spec(group.rank(), group.size(), payload, tokens=8), timeout_ns=2 * SECOND)
        exchange = open_exchange(group, spec)
        x, ids, weights = on_gpu(make_inputs(spec, "max_tokens", 1)[spec.rank])
        if spec.rank == 0:
            ids = torch.full_like(ids, 5)
        guarded, counts = Guarded(exchange), torch.zeros(len(spec.local_experts), dtype=torch.int32).cuda()
        out, error = guarded.out if view is View.PADDED else None, None
        try:
            exchange.dispatch(x, ids, weights, view, out=out, counts=counts)
            exchange.synchronize()
        except (InvalidArgument, GroupAborted) as raised:  # others may have all their rows before the abort
            error = raised
        if spec.rank == 0:
            assert isinstance(error, InvalidArgument), repr(error)
            assert "topk_ids" in str(error) and "distinct" in str(error)
        torch.cuda.synchronize()
        guarded.check()
        most = spec.num_ranks * spec.max_tokens
        assert int(counts.max()) <= most, "a masked product would read beyond the rows"
        dist.barrier(group)
        exchange.reset()
        run_pair(OnGpu(exchange), "zipf", 2, View.PADDED)
        close_exchange(exchange)


class Guarded:
    """PADDED outputs with memory of another expert behind them, which must stay as it is."""

    def __init__(self, exchange: NvlinkExchange) -> None:
        spec = exchange.spec
        rows, scales = exchange.empty_padded()
        local = len(spec.local_experts)
        self._rows = torch.empty((local + 1, *rows.shape[1:]), dtype=rows.dtype, device="cuda")
        self._behind = [self._rows[local].view(torch.uint8)]
        out_scales = None
        if scales is not None:
            plane = torch.empty((local + 1, scales.shape[2], scales.stride(2)), device="cuda")
            out_scales = plane[:local].transpose(1, 2)[:, : rows.shape[1]]
            self._behind.append(plane[local].view(torch.uint8))
        for each in self._behind:
            each.fill_(GUARD)
        self.out = (self._rows[:local], out_scales)

    def check(self) -> None:
        for each in self._behind:
            assert bool((each == GUARD).all()), "written beyond the outputs"


def not_finite(group: dist.ProcessGroup) -> None:
    """Infinities and NaNs arrive as what the oracle has, also where a word of scales has all bits set."""
    for payload in (Payload.FP8_UE8M0, Payload.FP8, Payload.FP8_POW2):
        spec = replace(a_models_spec(group.rank(), group.size(), payload, tokens=8), hidden=1024)
        exchange = open_exchange(group, spec)
        inputs = make_inputs(spec, "max_tokens", 3)
        for each in inputs:
            each.x[0, ::128] = torch.inf  # every group of every word
            each.x[1, ::128] = torch.nan
            each.x[2, :512:128] = -torch.inf
            each.x[3, 130] = torch.nan
        wanted = expect(spec, inputs)
        received = exchange.dispatch(*on_gpu(inputs[spec.rank]), View.COMPACT)
        got = dequantise(received.rows, received.scales).cpu()
        exchange.synchronize()
        assert wanted.scales is not None
        want = dequantise(wanted.rows, wanted.scales)
        assert want.isnan().any() and want.isfinite().any()
        # A NaN of rows and a NaN of scales is the same to whoever multiplies them.
        assert_equal(got.nan_to_num(nan=1e30), want.nan_to_num(nan=1e30), f"{payload}: values received")
        close_exchange(exchange)
