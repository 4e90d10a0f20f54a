"""Programs of ranks whose rows lie on a GPU, one for all, and travel by a provider that reaches its memory.

As in gpu_host_staging.py, calls are made behind kernels that take long.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from ep_server.exchange.api import ExchangeSpec, Payload
from ep_server.exchange.fabric.device import FabricDeviceExchange
from ep_server.exchange.fabric.device_rows import DeviceRows
from ep_server.exchange.fabric.gpu_direct import rows_on_device
from ep_server.exchange.fabric.settings import FabricOptions
from tests.support.exchange.conformance import run_cases
from tests.support.exchange.sequences import run_sequences
from tests.support.fabric import direct_ends
from tests.support.fabric.fabric_ends import through_group
from tests.support.fabric.gpu_host_staging import SHARED, OnGpu, a_models_spec, run_in_flight, run_refused


def make(options: FabricOptions, spec: ExchangeSpec, group: dist.ProcessGroup) -> FabricDeviceExchange:
    torch.cuda.set_device(SHARED)
    exchange = direct_ends.make_on(torch.device(SHARED), options, spec, group)
    assert exchange.staging.rows.kind == DeviceRows.CUDA and exchange.device == torch.device(SHARED)
    return exchange


def whole_suite(group: dist.ProcessGroup, options: FabricOptions) -> dict[str, str]:
    def factory(spec: ExchangeSpec, group: dist.ProcessGroup) -> OnGpu:
        return OnGpu(make(options, spec, group))

    return run_cases(group, factory) | run_sequences(group, factory)


def in_flight(group: dist.ProcessGroup, options: FabricOptions) -> None:
    run_in_flight(group, partial(make, options))


def refused(group: dist.ProcessGroup, options: FabricOptions) -> None:
    """On an end that is made as users make it, for which the driver is asked."""
    spec = a_models_spec(group, Payload.BF16)
    options = direct_ends.own_name(options)
    rows = rows_on_device("hmem", spec, torch.device(SHARED), options)
    assert rows is not None and rows.kind == DeviceRows.CUDA
    made = direct_ends.over(rows, options, through_group(group))
    run_refused(made)
