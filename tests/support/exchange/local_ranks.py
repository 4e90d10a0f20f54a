"""Several ranks as threads of one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ep_server.errors import ExchangeError
from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.host import open_group
from ep_server.exchange.segment import create_segment
from ep_server.exchange.spec import control_spec

if TYPE_CHECKING:  # there only where nvcc was
    from ep_server.exchange.nvlink.exchange import NvlinkExchange

Made = TypeVar("Made")


def from_local(devices: Sequence[int], spec: ExchangeSpec, **options: Any) -> list[NvlinkExchange]:
    """Exchanges of several GPUs: exchange i has rank i and GPU devices[i].

    One thread may call the halves of all GPUs in turn, each with its GPU current. all_gather, barrier and
    reset return once every rank has called them, so there each exchange needs a thread of its own.
    """
    from ep_server.exchange.nvlink.exchange import NvlinkExchange

    specs = [replace(spec, rank=rank) for rank in range(spec.num_ranks)]
    fd = create_segment(control_spec(spec))
    try:
        controls = [open_group(control_spec(each), fd) for each in specs]
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
