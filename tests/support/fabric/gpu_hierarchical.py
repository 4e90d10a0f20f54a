"""Programs of ranks on GPUs that count as several hosts: NVLink inside each, the loopback between them.

With fewer GPUs than ranks the hosts share them: then ranks of one host still have different ones.
"""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from ep_server.errors import PeerLost, PeerTimeout
from ep_server.exchange.api import ExchangeSpec, Payload, View
from ep_server.exchange.fabric.device import FabricDeviceExchange
from ep_server.exchange.fabric.settings import FabricOptions
from ep_server.exchange.hierarchical.exchange import HierarchicalExchange
from tests.support.exchange.conformance import run_cases, run_pair
from tests.support.exchange.sequences import run_sequences
from tests.support.fabric import hierarchical_ends, mixed_ends
from tests.support.fabric.gpu_host_staging import OnGpu, a_models_spec, run_in_flight, run_refused

Hosts = tuple[int, ...]


def gpu_of(hosts: Hosts, rank: int) -> int:
    return rank if torch.cuda.device_count() >= len(hosts) else rank - hosts.index(hosts[rank])


def make(
    options: FabricOptions, hosts: Hosts, spec: ExchangeSpec, group: dist.ProcessGroup
) -> HierarchicalExchange:
    torch.cuda.set_device(gpu_of(hosts, spec.rank))
    inter = FabricDeviceExchange(mixed_ends.from_process_group(options, hosts, spec, group), "cuda")
    return hierarchical_ends.on_gpus(inter, hosts, validate=True)


def whole_suite(group: dist.ProcessGroup, options: FabricOptions, hosts: Hosts) -> dict[str, str]:
    """Bfloat16 in place of float32, which no GPU sends."""

    def factory(spec: ExchangeSpec, group: dist.ProcessGroup) -> OnGpu:
        return OnGpu(make(options, hosts, spec, group))

    cases = run_cases(group, factory, instead_of_fp32=Payload.BF16)
    return cases | run_sequences(group, factory, payload=Payload.BF16)


def many_rows(group: dist.ProcessGroup, options: FabricOptions, hosts: Hosts) -> None:
    """A step with many rows gives what one with few does, in turns."""
    exchange = make(options, hosts, a_models_spec(group, Payload.BF16), group)
    few, many = OnGpu(exchange), exchange.normal
    assert (many is not None) is (max(map(hosts.count, hosts)) > 1)
    for seed in range(3 if many is not None else 0):
        for each in (OnGpu(many), few):  # type: ignore[arg-type]
            run_pair(each, "uniform", seed, View.INDEX)  # type: ignore[arg-type]
    exchange.barrier()
    exchange.close()


def in_flight(group: dist.ProcessGroup, options: FabricOptions, hosts: Hosts) -> None:
    run_in_flight(group, partial(make, options, hosts))


def refused(group: dist.ProcessGroup, options: FabricOptions, hosts: Hosts) -> None:
    run_refused(make(options, hosts, a_models_spec(group, Payload.BF16), group))


def one_stops(group: dist.ProcessGroup, options: FabricOptions, hosts: Hosts) -> None:
    """The last rank sends nothing any more: all others name it, by its number in the whole group."""
    spec = ExchangeSpec(
        group.rank(), group.size(), tuple(range(group.size())), 4, 128, 2, timeout_ns=2_000_000_000
    )
    exchange, last = make(options, hosts, spec, group), group.size() - 1
    x = torch.ones(4, 128, dtype=torch.bfloat16, device="cuda")
    ids = torch.tensor([[0, last]], device="cuda").repeat(4, 1)
    weights = torch.full((4, 2), 0.5, device="cuda")
    received = exchange.dispatch_send(x, ids, weights).recv(View.PADDED)
    assert torch.equal(exchange.combine_send(received.rows, received).recv(), x)
    exchange.barrier()
    if spec.rank != last:
        begin = time.monotonic()
        with pytest.raises((PeerTimeout, PeerLost)) as caught:
            exchange.dispatch_send(x, ids, weights).recv()
        assert caught.value.peer == last
        assert time.monotonic() - begin < 10, "the deadline is two seconds"
    dist.barrier(group)
    exchange.close()
