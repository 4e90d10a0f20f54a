"""Makes HybridExchanges of ranks that have a BounceExchange already: the ranks of each host find one another.

Their exchange in host memory needs a segment; the first rank of a host makes it and passes its descriptor to
the others over a Unix socket, whose name all learn through the BounceExchange.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from ep_server.errors import ConfigError
from ep_server.exchange.api import ExchangeSpec, control_spec
from ep_server.exchange.fabric.host_staging import BounceExchange
from ep_server.exchange.hierarchical.exchange import HybridExchange
from ep_server.exchange.hierarchical.host_part import ranks_of_host, spec_of_host
from ep_server.exchange.hierarchical.pending import Near
from ep_server.exchange.nvlink.memory import Serving, listening, take_descriptor
from ep_server.exchange.segment import create_segment
from ep_server.exchange.shm import NativeExchange

OnOpen = Callable[[NativeExchange], None]


def on_gpus(
    far: BounceExchange,
    hosts: tuple[int, ...],
    on_open: OnOpen | None = None,
    *,
    validate: bool = False,
) -> HybridExchange:
    """The exchange of this rank, with NVLink inside each host. Collective over all ranks of `far`.

    Args:
        far: on this rank's GPU; owned by the result, closed where this fails.
        hosts: [R] number of each rank's host; the ranks of a host follow one another.
        on_open: gets the exchange that the host's ranks meet in, before it waits for anybody.
        validate: see HybridExchange.
    Raises: ConfigError; StartupError where a GPU, its driver or peer access is missing; ExchangeError where
      another rank failed.
    """

    def make(spec: ExchangeSpec, fd: int) -> Near:
        from ep_server.exchange.nvlink.exchange import CudaExchange  # there only where its driver is

        control = NativeExchange(control_spec(spec), fd=fd)
        if on_open is not None:
            on_open(control)
        return CudaExchange(spec, control=control, device=far.device.index)

    return compose(far, hosts, control_spec, make, validate=validate)


def compose(
    far: BounceExchange,
    hosts: tuple[int, ...],
    shared: Callable[[ExchangeSpec], ExchangeSpec],
    make: Callable[[ExchangeSpec, int], Near],
    *,
    validate: bool = False,
) -> HybridExchange:
    """The same of any exchange inside a host.

    Args:
        shared: of what spec the host's segment is, given that of its ranks.
        make: this rank's end, given the spec and a descriptor of the segment, which stays the caller's.
    """
    near: Near | None = None
    try:
        if far.inner.on_timeout != "raise":
            allowed = "raise: a rank would be masked between hosts only"
            raise ConfigError("on_timeout", far.inner.on_timeout, allowed)
        ranks = ranks_of_host(hosts, far.spec)
        spec = spec_of_host(far.spec, ranks)
        fd = _host_segment(far.inner, shared(spec), ranks)
        try:
            near = make(spec, fd)
        finally:
            os.close(fd)
        exchange = HybridExchange(near, far, hosts, validate=validate)
        far.barrier()
    except BaseException:
        far.inner.abort()  # else the others would wait for this rank
        try:
            if near is not None:
                near.close()
        finally:
            far.close()
        raise
    return exchange


def _host_segment(far: NativeExchange, spec: ExchangeSpec, ranks: range) -> int:
    """One segment of `spec` on all ranks of a host, a descriptor for each to close. Collective over far."""
    with contextlib.ExitStack() as stack:
        name = b""
        if far.spec.rank == ranks.start:
            made = create_segment(spec)
            stack.callback(os.close, made)
            server = stack.enter_context(listening(len(ranks)))
            name = server.getsockname()
            stack.callback(Serving(server, made, len(ranks)).stop)
        far.barrier()  # to create a large segment takes its time
        first = far.all_gather(name)[ranks.start]
        fd = take_descriptor(ranks.start, first)
        try:
            far.barrier()  # until then the first rank serves
        except BaseException:
            os.close(fd)
            raise
        return fd
