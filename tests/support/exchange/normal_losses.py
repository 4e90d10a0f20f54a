"""A rank that does not call: the others' high-throughput calls end with an error, by their deadline."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from ep_server.compat import deep_ep
from ep_server.errors import ExchangeError, PeerTimeout
from tests.support.exchange.normal_programs import HIDDEN, NUM_EXPERTS, NormalUser


def stays_away(
    group: dist.ProcessGroup, device: str, call: str, network: deep_ep.Network | None = None
) -> None:
    """Rank 1 leaves out a dispatch or a combine. Rank 0 names it; nobody waits for ever. Then all go on."""
    user = NormalUser(group, device, seconds=1.0, network=network)
    everyone = user.everyone("uniform", 2)
    mine = everyone[user.rank]
    x, layout = user.rows(mine, "bf16"), user.layout(mine)
    _, _, _, _, handle, _ = user.buffer.dispatch(x, **layout)
    results = user.results(everyone, user.rank).to(user.device)
    user.check_combine(everyone, handle)
    dist.barrier(group)
    if user.rank == 0:
        with pytest.raises(PeerTimeout) as caught:
            if call == "combine":
                user.buffer.combine(results, handle)
                user.synchronize()
            user.buffer.dispatch(x, **layout)
        assert caught.value.peer == 1, caught.value
    dist.barrier(group)
    if user.rank == 1:
        with pytest.raises(ExchangeError):
            user.buffer.dispatch(x, **layout)
    dist.barrier(group)
    user.buffer.clean_low_latency_buffer(1, HIDDEN, NUM_EXPERTS)
    recv_x, _, _, _, handle, _ = user.buffer.dispatch(x, **layout)
    user.check_received(everyone, "bf16", recv_x)
    user.check_combine(everyone, handle)
    dist.barrier(group)
    user.buffer.destroy()
