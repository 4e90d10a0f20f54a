"""[7] [8] A sparse block: route, dispatch, experts, combine, with a yield after each send.

Between a send and its receive the generator yields, so a driver can run another micro-batch while rows are
in flight. The arithmetic of the experts is `Compute.gated_ffn`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from ep_server.exchange.api import Exchange, Payload, Received
from ep_server.exchange.quant import dequantise
from ep_server.models.compute import GatedFfn
from ep_server.models.families.spec import GroupScore, RouterSpec, Score
from ep_server.models.layers import MoeWeights
from ep_server.models.slots import SlotTable
from ep_server.models.timers import Phase, PhaseClock

_LANES = 64  # rows of whole vectors, on any processor


def route(
    x: torch.Tensor, weights: MoeWeights, spec: RouterSpec, drawn: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses experts for x: [T, H]. Returns distinct ids [T, K] int64 and weights [T, K] float32.

    All arithmetic is float32. The order of operations is the same for every family (see RouterSpec):
      1 logits = x @ router            4 ids = top-k of the choice
      2 score = softmax or sigmoid     5 weight = score of the chosen, without the bias
      3 choice = score + bias,         6 weight /= sum + eps        (renormalise)
        limited to the best groups     7 weight *= scale

    Args:
        drawn: [T, K], ids in place of the router's choice.
    """
    logits = weights.router(x.float())
    score = logits.softmax(-1) if spec.score is Score.SOFTMAX else _sigmoid(logits)
    ids = drawn
    if ids is None:
        choice = score if weights.bias is None else score + weights.bias
        if spec.groups > 1:
            choice = _limit_to_groups(choice, spec)
        ids = torch.topk(choice, spec.top_k, dim=-1).indices
    gates = score.gather(1, ids)
    if spec.renormalise:
        total = gates.sum(-1, keepdim=True)
        gates = gates / (total + spec.renorm_eps if spec.renorm_eps else total)
    return ids, gates * spec.scale if spec.scale != 1.0 else gates


def _limit_to_groups(choice: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Sets every expert outside the token's best groups to -inf."""
    grouped = choice.view(len(choice), spec.groups, spec.num_experts // spec.groups)
    if spec.group_score is GroupScore.MAX:
        group_score = grouped.amax(-1)
    else:
        group_score = grouped.topk(2, dim=-1).values.sum(-1)
    best = torch.topk(group_score, spec.top_groups, dim=-1).indices
    outside = torch.ones_like(group_score, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(outside[..., None], float("-inf")).flatten(1)


def _sigmoid(logits: torch.Tensor) -> torch.Tensor:
    """Of [T, E], the same bits for a row wherever it lies: torch's last few elements take another path."""
    missing = -logits.shape[1] % _LANES
    return torch.nn.functional.pad(logits, (0, missing)).sigmoid()[:, : logits.shape[1]]


_BITS = 0xFFFFFFFF
ZIPF_STEP = 31  # experts by which the order of popularity differs between layers
_GOLDEN = 0x9E3779B9  # apart from each other, numbers times this differ in all bits


class UniformRouting:
    """Draws expert ids at random: every set of K experts is equally likely, unless there is an exponent.

    For benchmarks with random weights, so that the router's preferences do not decide what is measured. A
    draw depends on seed, request number, position and layer only. Nothing waits for the host.

    seed: 0 to 2^32 - 1. exponent: Zipf's law, the n-th most popular expert of a layer has
      1/n^exponent of the first one's weight. Layers differ in which one that is.
    """

    def __init__(
        self, router: RouterSpec, seed: int, device: torch.device | None = None, exponent: float = 0.0
    ) -> None:
        self._top_k, self.seed, self.exponent = router.top_k, seed, exponent
        self._experts = torch.arange(router.num_experts, device=device)

    def identify(self, numbers: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Names each token: [T] int64.

        Args:
            numbers: [T] int64, of its request. positions: [T] int64, in its sequence.
        """
        return _mixed(_mixed(_mixed(numbers ^ self.seed) ^ (numbers >> 32) ^ _GOLDEN) ^ positions)

    def draw(self, tokens: torch.Tensor, layer: int) -> torch.Tensor:
        """Distinct experts of each token. tokens: [T], of identify(). Returns: [T, K] int64."""
        state = _mixed(tokens ^ ((layer + 1) * _GOLDEN & _BITS))
        keys = _mixed(state[:, None] ^ (self._experts * _GOLDEN & _BITS))
        if self.exponent:  # Gumbel keys: the largest are a draw without replacement
            place = (self._experts + layer * ZIPF_STEP) % len(self._experts) + 1
            uniform = ((keys >> 9) + 0.5) * 2.0**-23  # exact in float32, never 0 or 1
            gumbel = -torch.log(-torch.log(uniform))
            return torch.topk(gumbel - self.exponent * torch.log(place), self._top_k, dim=-1).indices
        # The id in the low digits: no two keys of a token are equal, so the order never is a matter of taste.
        ordered = keys * len(self._experts) + self._experts
        return torch.topk(ordered, self._top_k, dim=-1).indices


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """A permutation of 32-bit numbers in which every bit of x changes about half of the result's."""
    x = x & _BITS
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _BITS
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _BITS
    return x ^ (x >> 16)


Tally = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def tally(rows: torch.Tensor, total: torch.Tensor, active: torch.Tensor) -> None:
    """total: [layers, E] += rows, active: [] += how many of these are not 0, rows: [layers, E] = 0."""
    active += torch.count_nonzero(rows)
    total += rows
    rows.zero_()


class ExpertCounter:
    """Rows that this rank's experts received.

    rows: one [E_local] of `dtype` per layer, to be added to during a step.
    total: [layers, E_local] int64, of all steps before.
    active: [] int64, experts with at least one row, added up over layers and steps.

    Args:
        tally: what a step ends with.
    """

    def __init__(
        self,
        layers: int,
        local_experts: int,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.int64,
        tally: Tally = tally,
    ) -> None:
        self._tally = tally
        self._step = torch.zeros(layers, local_experts, dtype=dtype, device=device)
        self.rows = self._step.unbind()
        self.total = torch.zeros(layers, local_experts, dtype=torch.int64, device=device)
        self.active = torch.zeros((), dtype=torch.int64, device=device)

    def finish(self) -> None:
        """The step ended."""
        self._tally(self._step, self.total, self.active)


def dense_ffn(x: torch.Tensor, ffn: GatedFfn) -> torch.Tensor:
    """All rows of x: [T, H] through the one FFN there is: [T, H]."""
    return ffn(x, torch.tensor([0, len(x)], device=x.device))


def received_rows(received: Received, dtype: torch.dtype) -> torch.Tensor:
    """The rows of a compact receive as [N, H] of `dtype`; FP8 rows are multiplied by their scales."""
    if received.scales is None:
        return received.rows.to(dtype)
    return dequantise(received.rows, received.scales).to(dtype)


@dataclass(frozen=True, slots=True)
class MoeContext:
    """What surrounds the sparse block of one layer.

    expert_tokens: [E_local] int64, rows received in this step.
    uniform: draws the experts in place of the router, None where the router is asked.
    slots: where experts are, None where the exchange numbers them as the router does.
    """

    layer: int
    router: RouterSpec
    exchange: Exchange
    clock: PhaseClock
    expert_tokens: torch.Tensor
    uniform: UniformRouting | None = None
    slots: SlotTable | None = None


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
    if on.slots is not None:
        ids = on.slots.of(on.layer, ids)
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
