"""[7] [8] A sparse block: route, dispatch, experts, combine, with a yield at each hook.

Between a send and its receive the generator yields, so a driver can run another micro-batch while rows are
on their way. Knows the exchange by its Protocol only.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch

from ep_server.exchange.api import Exchange, Payload
from ep_server.models.experts import dense_ffn, received_rows
from ep_server.models.families.spec import RouterSpec
from ep_server.models.layers import MoeWeights
from ep_server.models.router import route
from ep_server.models.timers import Phase, PhaseClock
from ep_server.models.uniform import UniformRouting


@dataclass(frozen=True, slots=True)
class MoeContext:
    """What surrounds the sparse block of one layer.

    expert_tokens: [E_local] int64, rows received in this step.
    uniform: draws the experts in place of the router, None where the router is asked.
    """

    layer: int
    router: RouterSpec
    exchange: Exchange
    clock: PhaseClock
    expert_tokens: torch.Tensor
    uniform: UniformRouting | None = None


def moe(
    x: torch.Tensor, w: MoeWeights, on: MoeContext, tokens: torch.Tensor | None = None
) -> Generator[None, None, torch.Tensor]:
    """Sparse FFN of x: [T, H], normed; yields twice and returns [T, H] of x's dtype. T may be 0.

    Args:
        tokens: [T], of UniformRouting.identify(); with it the experts are drawn, and get the weights that the
            router gives them.
    """
    clock = on.clock
    drawn = None if on.uniform is None or tokens is None else on.uniform.draw(tokens, on.layer)
    ids, gates = route(x, w, on.router, drawn)
    clock.lap(Phase.ROUTER)
    dispatched = on.exchange.dispatch_send(x.to(wire_dtype(on.exchange.spec.payload)), ids, gates)
    clock.lap(Phase.DISPATCH)
    yield
    received = dispatched.recv()
    clock.lap(Phase.DISPATCH)
    outputs = w.experts(received_rows(received, x.dtype), received.offsets)
    on.expert_tokens.add_(received.counts)
    clock.lap(Phase.EXPERTS)
    combined = on.exchange.combine_send(outputs.to(wire_dtype(on.exchange.spec.payload)), received)
    clock.lap(Phase.COMBINE)
    shared = None if w.shared is None else dense_ffn(x, w.shared)  # while the combine is in flight
    clock.lap(Phase.EXPERTS)
    yield
    routed = combined.recv().to(x.dtype)
    clock.lap(Phase.COMBINE)
    return routed if shared is None else routed + shared


def wire_dtype(payload: Payload) -> torch.dtype:
    """What the exchange takes and returns: float32 for FP32, bfloat16 for every other payload."""
    return torch.float32 if payload is Payload.FP32 else torch.bfloat16
