"""What ranks on GPUs run where killed_rank.py kills one of them in the middle of a dispatch."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from ep_server.errors import GroupAborted, PeerTimeout
from ep_server.exchange.api import View
from ep_server.exchange.host import HostExchange
from ep_server.exchange.nvlink.exchange import NvlinkExchange
from tests.support.compare import assert_equal
from tests.support.exchange.conformance import run_pair
from tests.support.exchange.gpu_group import on_gpu, run_fused, sums_without
from tests.support.exchange.killed_rank import DEATHS, EPOCH, killed_spec
from tests.support.exchange.on_gpu import OnGpu
from tests.support.exchange.ranks import Peer
from tests.support.exchange.routing import Inputs, make_inputs
from tests.support.gpus import gpu_of


def rank_1_dies(control: HostExchange, name: str, on_timeout: str, peer: Peer) -> tuple[str, float]:
    """Rank 1 is killed in its third dispatch; the others then dispatch, and go on without it.

    Returns: of a survivor, what it found (op/phase of whom, or the error's class; "" with a mask); seconds.
    """
    rank, ranks, death = control.spec.rank, control.spec.num_ranks, DEATHS[name]
    torch.cuda.set_device(gpu_of(rank))
    exchange = NvlinkExchange(
        killed_spec(rank, ranks, death), control=control.group, on_timeout=on_timeout, num_sms=death.num_sms
    )
    exchange.set_faults(death.faults)
    spec = exchange.spec
    for step in range(EPOCH - 1):
        run_pair(OnGpu(exchange, fused=True), "max_tokens", step, View.PADDED)
    inputs = make_inputs(spec, "max_tokens", 5)
    mine = inputs[rank]
    if rank == 1:
        # Its kernel runs by then; nothing on the host can tell.
        threading.Timer(0.5, peer.tell, (os.getpid(),)).start()
        exchange.dispatch(*on_gpu(mine))
        peer.hear()  # never comes
    assert peer.hear() == "rank 1 is dead"
    began, found = time.monotonic(), ""
    if on_timeout == "raise":
        with pytest.raises((PeerTimeout, GroupAborted)) as caught:
            run_fused(exchange, mine) if name == "while_it_waits" else run_in_place(exchange, mine)
        found = type(caught.value).__name__
        if isinstance(caught.value, PeerTimeout):
            found = f"{caught.value.op}/{caught.value.phase} of {caught.value.peer}"
        seconds = time.monotonic() - began
        exchange.reset(dead=[1])
    wanted = sums_without(spec, inputs, 1)
    for turn in range(5):
        assert_equal(run_fused(exchange, mine), wanted, f"turn {turn} after the death")
        if turn == 0 and on_timeout == "mask":
            seconds = time.monotonic() - began
    assert exchange.masked == {1}
    exchange.check()
    return found, seconds


def run_in_place(exchange: NvlinkExchange, mine: Inputs) -> None:
    """A dispatch that fails. Whoever reads its view must stay inside it: kernels may follow at once."""
    spec, shapes = exchange.spec, exchange.shapes
    most, wild = shapes.most_rows, 1 << 40
    shapes.row_ids = lambda rows: torch.full((rows,), wild, device="cuda")  # type: ignore[method-assign]
    received = exchange.dispatch(*on_gpu(mine), View.INDEX, capacity=most)
    torch.cuda.synchronize()
    assert received.row_ids is not None
    ids = received.row_ids[: int(received.offsets[-1])]
    assert bool((ids < spec.num_banks * spec.num_ranks * spec.max_tokens).all()), ids
    exchange.check()
