"""What ranks on GPUs run in tests where one of them is killed in the middle of a dispatch.

Run by tests.harness.ranks, on its exchange in host memory: that one knows who has died.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch

from ep_server.ep.cuda import CudaExchange
from ep_server.ep.exchange import ExchangeSpec, Payload, View, control_spec
from ep_server.ep.faults import Action, Fault
from ep_server.ep.native import NativeExchange
from ep_server.errors import GroupAborted, PeerTimeout
from tests.ep.conformance import run_pair
from tests.ep.gpu_group import a_models_spec, on_gpu, run_fused, sums_without
from tests.ep.on_gpu import OnGpu
from tests.harness.compare import assert_equal
from tests.harness.gpus import gpu_of
from tests.harness.ranks import Peer
from tests.harness.routing import make_inputs

SECOND = 1_000_000_000
EPOCH = 3  # of the dispatch in which it dies
DELAY = Fault(1, "dispatch", "send_rows", Action.DELAY, epoch=EPOCH, delay_ns=60 * SECOND)
DROP = Fault(1, "dispatch", "send_rows", Action.DROP, epoch=EPOCH)


@dataclass(frozen=True)
class Death:
    """How far rank 1 comes. num_sms: 0 = all."""

    faults: tuple[Fault, ...]
    tokens: int = 4
    num_sms: int = 0


DEATHS = {
    "header_without_rows": Death((DROP,)),
    # A row has two blocks at this size, of which every second is held: its entries come, its end does not.
    "half_of_each_row": Death((DELAY,)),
    # Four blocks take 64 tokens in turn.
    "half_of_the_rows": Death((DELAY,), tokens=64, num_sms=1),
    "while_it_waits": Death(()),
}


def killed_spec(rank: int, num_ranks: int, death: Death) -> ExchangeSpec:
    """Rank 1 does not give up before it is killed: that would end the others' waits."""
    timeout_ns = 60 * SECOND if rank == 1 else 3 * SECOND
    spec = a_models_spec(rank, num_ranks, Payload.BF16, tokens=death.tokens)
    return replace(spec, timeout_ns=timeout_ns)


def control_kwargs(num_ranks: int, name: str) -> dict[str, Any]:
    """Of the host-memory exchange that the harness makes."""
    fields = asdict(control_spec(killed_spec(0, num_ranks, DEATHS[name])))
    return {name: value for name, value in fields.items() if name not in {"rank", "num_ranks"}}


def rank_1_dies(control: NativeExchange, name: str, on_timeout: str, peer: Peer) -> tuple[str, float]:
    """Rank 1 is killed in its third dispatch; the others then dispatch, and go on without it.

    Returns: of a survivor, what it found (op/phase of whom, or the error's class; "" with a mask); seconds.
    """
    rank, ranks, death = control.spec.rank, control.spec.num_ranks, DEATHS[name]
    torch.cuda.set_device(gpu_of(rank))
    exchange = CudaExchange(
        killed_spec(rank, ranks, death), control=control, on_timeout=on_timeout, num_sms=death.num_sms
    )
    exchange.set_faults(death.faults)
    spec = exchange.spec
    for step in range(EPOCH - 1):
        run_pair(OnGpu(exchange, fused=True), "max_tokens", step, View.PADDED)
    inputs = make_inputs(spec, "max_tokens", 5)
    mine = inputs[rank]
    if rank == 1:
        exchange.dispatch(*on_gpu(mine))
        time.sleep(0.5)  # its kernel runs by now; nothing on the host can tell
        peer.tell(os.getpid())
        peer.hear()  # never comes
    assert peer.hear() == "rank 1 is dead"
    began, found = time.monotonic(), ""
    if on_timeout == "raise":
        with pytest.raises((PeerTimeout, GroupAborted)) as caught:
            run_fused(exchange, mine)
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
