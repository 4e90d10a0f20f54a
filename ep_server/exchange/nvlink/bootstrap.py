"""Makes exchanges of GPUs: one for a rank of a torch.distributed group, or all of one process.

Imported where there may be no driver: NvlinkExchange is only once it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from ep_server.errors import ConfigError, ExchangeError
from ep_server.exchange import bootstrap
from ep_server.exchange.api import ExchangeSpec, control_spec
from ep_server.exchange.geometry import check_spec
from ep_server.exchange.segment import create_segment
from ep_server.exchange.shm import ShmExchange

if TYPE_CHECKING:  # it is there only where nvcc was
    from ep_server.exchange.nvlink.exchange import NvlinkExchange

Made = TypeVar("Made")


def from_process_group(group: Any, spec: ExchangeSpec, **options: Any) -> NvlinkExchange:
    """The exchange of this rank of a torch.distributed group on one host. Collective.

    Args:
        group: a ProcessGroup with object collectives (gloo), or None for the default one.
        options: keywords of NvlinkExchange.
    """
    from ep_server.exchange.nvlink.exchange import NvlinkExchange  # there only where nvcc was

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if (spec.rank, spec.num_ranks) != (rank, size):
        raise ConfigError("rank, num_ranks", (spec.rank, spec.num_ranks), f"{(rank, size)}, as in the group")
    control = bootstrap.from_process_group(group, control_spec(spec))
    return NvlinkExchange(spec, control=control, **options)


def from_local(devices: Sequence[int], spec: ExchangeSpec, **options: Any) -> list[NvlinkExchange]:
    """Exchanges of several GPUs of one process, in rank order: exchange i has rank i and GPU devices[i].

    One thread may call the halves of all GPUs in turn, each with its GPU current: they enqueue, and wait for
    no other rank. What meets in host memory (all_gather, barrier, reset) returns once every rank has called
    it, so there each exchange needs a thread of its own. close() meets nobody.

    Args:
        spec: of any rank.
        options: keywords of NvlinkExchange but device, the same for all.
    Raises: ConfigError; StartupError where a GPU, its driver or peer access is missing.
    """
    check_spec(spec)
    if len(devices) != spec.num_ranks or len(set(devices)) != len(devices) or min(devices) < 0:
        raise ConfigError("devices", list(devices), f"{spec.num_ranks} different GPUs, one for each rank")
    from ep_server.exchange.nvlink.exchange import NvlinkExchange  # there only where nvcc was

    specs = [replace(spec, rank=rank) for rank in range(spec.num_ranks)]
    fd = create_segment(control_spec(spec))
    try:
        controls = [ShmExchange(control_spec(each), fd=fd) for each in specs]
    finally:
        os.close(fd)

    def make(rank: int) -> NvlinkExchange:
        return NvlinkExchange(specs[rank], control=controls[rank], device=devices[rank], **options)

    return run_together(make, spec.num_ranks)


def run_together(call: Callable[[int], Made], num_ranks: int) -> list[Made]:
    """call(rank) in a thread for each rank, whose calls may wait for one another; their results.

    Raises: what made the first rank fail, rather than what it did to the others.
    """
    with ThreadPoolExecutor(num_ranks) as pool:
        running = [pool.submit(call, rank) for rank in range(num_ranks)]
    errors = [error for future in running if (error := future.exception()) is not None]
    if errors:
        raise min(
            errors, key=lambda e: isinstance(e, ExchangeError) or isinstance(e.__cause__, ExchangeError)
        )
    return [future.result() for future in running]
