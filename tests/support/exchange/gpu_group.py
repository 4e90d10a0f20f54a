"""What programs of ranks on GPUs share: exchanges, sizes, experts and sums on paper."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ep_server.compat.deep_ep import bootstrap
from ep_server.compat.deep_ep.bootstrap import group_segment
from ep_server.exchange.api import Exchange, ExchangeSpec, Payload, Received, View
from ep_server.exchange.fabric.device import FabricDeviceExchange
from ep_server.exchange.host import open_group
from ep_server.exchange.nvlink.bulk import NvlinkBulk, bulk_spec
from ep_server.exchange.nvlink.exchange import NvlinkExchange
from ep_server.exchange.quant import dequantise
from ep_server.exchange.spec import control_spec
from tests.support.exchange.conformance import Factory
from tests.support.exchange.expected import expect
from tests.support.exchange.on_gpu import OnGpu
from tests.support.exchange.routing import Inputs
from tests.support.fabric.hierarchical_ends import on_gpus
from tests.support.gpus import gpu_of

EXPERTS = 64


def open_exchange(group: dist.ProcessGroup, spec: ExchangeSpec, **options: Any) -> NvlinkExchange:
    """This rank's end, on its GPU. Collective."""
    torch.cuda.set_device(gpu_of(spec.rank))
    control = control_spec(spec)
    segment = group_segment(group, control)
    try:
        return NvlinkExchange(spec, control=open_group(control, segment), **options)
    finally:
        os.close(segment)


def open_bulk(group: dist.ProcessGroup, device: torch.device, timeout_ns: int, heap_bytes: int) -> NvlinkBulk:
    """This rank's end of the exchange of many rows. Collective."""
    spec = bulk_spec(group.rank(), group.size(), timeout_ns)
    control = control_spec(spec)
    segment = group_segment(group, control)
    try:
        return NvlinkBulk(spec, control=open_group(control, segment), device=device, heap_bytes=heap_bytes)
    finally:
        os.close(segment)


def open_rows(
    group: dist.ProcessGroup, hosts: tuple[int, ...], timeout_ns: int, tokens: int, row_bytes: int
) -> Exchange:
    """Moves rows of bytes: NVLink inside each host, memory between them. Collective."""
    spec = bootstrap._rows_spec(group, tokens, row_bytes, timeout_ns)
    inter = FabricDeviceExchange(bootstrap.from_process_group(group, spec), "cpu")
    normal = on_gpus(inter, hosts).normal
    assert normal is not None
    return normal


def close_exchange(exchange: NvlinkExchange) -> None:
    """Nobody leaves while a peer still writes."""
    exchange.synchronize()
    exchange.barrier()
    exchange.close()


def factory(*, fused: bool) -> Factory:
    """For the conformance suite. Apart, ids are checked before they are sent; fused, by the kernel."""

    def make(spec: ExchangeSpec, group: dist.ProcessGroup) -> OnGpu:
        return OnGpu(open_exchange(group, spec, validate=not fused), fused=fused)

    return make


def a_models_spec(rank: int, num_ranks: int, payload: Payload, tokens: int = 32) -> ExchangeSpec:
    share = tuple(e * num_ranks // EXPERTS for e in range(EXPERTS))
    return ExchangeSpec(rank, num_ranks, share, tokens, 2048, 8, payload, num_banks=2)


def on_gpu(mine: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return mine.x.cuda(), mine.ids.cuda(), mine.weights.cuda()


def factors_of(spec: ExchangeSpec) -> torch.Tensor:
    """[E_local, 1, 1] on the current GPU: what the experts of tests.support.exchange.expected multiply by."""
    factors = [(1.0 + e / 16) * (-1 if e % 2 else 1) for e in spec.local_experts]
    return torch.tensor(factors, device="cuda").view(-1, 1, 1)


def answer(received: Received, factors: torch.Tensor) -> torch.Tensor:
    """Answers to a PADDED view; can be captured."""
    rows = received.rows.float() if received.scales is None else dequantise(received.rows, received.scales)
    return (rows * factors).to(torch.bfloat16)


def many_rows(
    exchange: NvlinkExchange, mine: tuple[torch.Tensor, ...], factors: torch.Tensor
) -> torch.Tensor:
    """A pair with the exchange of many rows; can be captured."""
    many, spec = exchange.normal, exchange.spec
    assert many is not None
    capacity = spec.num_ranks * spec.max_tokens * min(spec.top_k, max(len(spec.local_experts), 1))
    received = many.dispatch_send(*mine).recv(View.INDEX, capacity=capacity)
    assert received.row_ids is not None
    place = torch.arange(capacity, device=received.offsets.device)
    expert = torch.searchsorted(received.offsets[1:], place, right=True).clamp(max=len(factors) - 1)
    rows = received.rows[received.row_ids.clamp(0, len(received.rows) - 1)].float()
    out = (rows * factors.view(-1)[expert][:, None]).to(torch.bfloat16)
    return many.combine_send(out, received).recv()


def run_experts(spec: ExchangeSpec, received: Received) -> torch.Tensor:
    """Answers to a PADDED view on the current GPU."""
    return answer(received, factors_of(spec))


def run_fused(exchange: NvlinkExchange, mine: Inputs) -> torch.Tensor:
    """One pair in two kernels; waits for the GPU."""
    received = exchange.dispatch(*on_gpu(mine))
    out = exchange.combine(run_experts(exchange.spec, received), received)
    exchange.synchronize()
    return out.cpu()


def sums_without(spec: ExchangeSpec, inputs: list[Inputs], dead: int) -> torch.Tensor:
    """What this rank gets where the experts of one rank answer nothing."""
    mine = inputs[spec.rank]
    gone = torch.tensor([owner == dead for owner in spec.placement])
    ids = torch.where(gone[mine.ids] & (mine.ids >= 0), -1, mine.ids)
    left = [replace(each, ids=ids) if each is mine else each for each in inputs]
    return expect(spec, left).combined
