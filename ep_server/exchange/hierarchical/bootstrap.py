"""Makes HierarchicalExchanges of ranks that have a FabricDeviceExchange: joins the ranks of each host.

Their exchange in host memory needs a segment; the first rank of a host makes it and passes its descriptor to
the others over a Unix socket, whose name all learn through the FabricDeviceExchange.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from ep_server.errors import ConfigError
from ep_server.exchange.api import ExchangeSpec, control_spec
from ep_server.exchange.fabric.device import FabricDeviceExchange
from ep_server.exchange.hierarchical.exchange import HierarchicalExchange, IntraExchange
from ep_server.exchange.hierarchical.host_part import ranks_of_host, spec_of_host
from ep_server.exchange.nvlink.memory import Serving, listening, take_descriptor
from ep_server.exchange.segment import create_segment
from ep_server.exchange.shm import ShmExchange

OnOpen = Callable[[ShmExchange], None]


def on_gpus(
    inter: FabricDeviceExchange,
    hosts: tuple[int, ...],
    on_open: OnOpen | None = None,
    *,
    validate: bool = False,
) -> HierarchicalExchange:
    """The exchange of this rank, with NVLink inside each host. Collective over all ranks of `inter`.

    Args:
        inter: on this rank's GPU; owned by the result, closed where this fails.
        hosts: [R] number of each rank's host; the ranks of a host follow one another.
        on_open: gets the exchange that the host's ranks meet in, before it waits for anybody.
        validate: see HierarchicalExchange.
    Raises: ConfigError; StartupError where a GPU, its driver or peer access is missing; ExchangeError where
      another rank failed.
    """

    def make(spec: ExchangeSpec, fd: int) -> IntraExchange:
        from ep_server.exchange.nvlink.exchange import NvlinkExchange  # there only where its driver is

        control = ShmExchange(control_spec(spec), fd=fd)
        if on_open is not None:
            on_open(control)
        return NvlinkExchange(spec, control=control, device=inter.device.index)

    return compose(inter, hosts, control_spec, make, validate=validate)


def compose(
    inter: FabricDeviceExchange,
    hosts: tuple[int, ...],
    shared: Callable[[ExchangeSpec], ExchangeSpec],
    make: Callable[[ExchangeSpec, int], IntraExchange],
    *,
    validate: bool = False,
) -> HierarchicalExchange:
    """The same of any exchange inside a host.

    Args:
        shared: of what spec the host's segment is, given that of its ranks.
        make: this rank's end, given the spec and a descriptor of the segment, which stays the caller's.
    """
    intra: IntraExchange | None = None
    try:
        if inter.inner.on_timeout != "raise":
            allowed = "raise: a rank would be masked between hosts only"
            raise ConfigError("on_timeout", inter.inner.on_timeout, allowed)
        ranks = ranks_of_host(hosts, inter.spec)
        spec = spec_of_host(inter.spec, ranks)
        fd = _host_segment(inter.inner, shared(spec), ranks)
        try:
            intra = make(spec, fd)
        finally:
            os.close(fd)
        exchange = HierarchicalExchange(intra, inter, hosts, validate=validate)
        inter.barrier()
    except BaseException:
        inter.inner.abort()  # else the others would wait for this rank
        try:
            if intra is not None:
                intra.close()
        finally:
            inter.close()
        raise
    return exchange


def _host_segment(inter: ShmExchange, spec: ExchangeSpec, ranks: range) -> int:
    """One segment of `spec` on all ranks of a host, a descriptor for each to close. Collective over inter."""
    with contextlib.ExitStack() as stack:
        name = b""
        if inter.spec.rank == ranks.start:
            made = create_segment(spec)
            stack.callback(os.close, made)
            server = stack.enter_context(listening(len(ranks)))
            name = server.getsockname()
            stack.callback(Serving(server, made, len(ranks)).stop)
        inter.barrier()  # to create a large segment takes its time
        first = inter.all_gather(name)[ranks.start]
        fd = take_descriptor(ranks.start, first)
        try:
            inter.barrier()  # until then the first rank serves
        except BaseException:
            os.close(fd)
            raise
        return fd
