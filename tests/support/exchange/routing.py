"""Named routings and the inputs of every rank, rebuilt anywhere from one seed.

Each rank's test process calls `make_inputs` and gets the inputs of all ranks, so the expected result
needs no communication. A row starts with (rank + 1, token): both below 256, so exact in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.validate import input_dtype


@dataclass(frozen=True)
class Inputs:
    """What one rank dispatches: x [T, H], ids [T, K] int64 with -1, weights [T, K] float32."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def make_inputs(spec: ExchangeSpec, routing: str, seed: int) -> list[Inputs]:
    """The inputs of all ranks, in rank order; `spec.rank` does not matter."""
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for rank, ids in enumerate(ROUTINGS[routing](spec, generator)):
        tokens = len(ids)
        x = torch.randn(tokens, spec.hidden, generator=generator)
        x[torch.rand(x.shape, generator=generator) < 0.05] = 0.0  # products of zeros show the sign of zero
        x[:, 0] = rank + 1
        x[:, 1] = torch.arange(tokens)
        weights = torch.rand(tokens, spec.top_k, generator=generator) + 0.01
        inputs.append(Inputs(x.to(input_dtype(spec)), ids, weights))
    return inputs


def uniform(spec: ExchangeSpec, generator: torch.Generator) -> list[torch.Tensor]:
    """Every rank has another number of tokens; experts are drawn evenly."""
    return [
        _draw(spec, 1 + (3 * rank + 1) % spec.max_tokens, generator, range(spec.num_experts))
        for rank in range(spec.num_ranks)
    ]


def max_tokens(spec: ExchangeSpec, generator: torch.Generator) -> list[torch.Tensor]:
    """Every rank has max_tokens tokens."""
    everyone = range(spec.num_experts)
    return [_draw(spec, spec.max_tokens, generator, everyone) for _ in range(spec.num_ranks)]


def all_to_one(spec: ExchangeSpec, generator: torch.Generator) -> list[torch.Tensor]:
    """Every token of every rank goes to the experts of the rank that owns the last expert."""
    owner = spec.placement[-1]
    theirs = [e for e, r in enumerate(spec.placement) if r == owner]
    return [_draw(spec, spec.max_tokens, generator, theirs) for _ in range(spec.num_ranks)]


def one_expert(spec: ExchangeSpec, generator: torch.Generator) -> list[torch.Tensor]:
    """Every token of every rank picks the same single expert: its region is filled to the brim."""
    return [_draw(spec, spec.max_tokens, generator, [0]) for _ in range(spec.num_ranks)]


def empty_rank(spec: ExchangeSpec, generator: torch.Generator) -> list[torch.Tensor]:
    """The last rank has no token, and nobody sends rank 0 anything (unless it owns every expert)."""
    others = [e for e, r in enumerate(spec.placement) if r != 0] or range(spec.num_experts)
    tokens = [spec.max_tokens - 1] * (spec.num_ranks - 1) + [0]
    return [_draw(spec, count, generator, others) for count in tokens]


def dropped(spec: ExchangeSpec, generator: torch.Generator) -> list[torch.Tensor]:
    """Some choices are -1, in any position; the first token of each rank has none left."""
    routed = []
    for rank in range(spec.num_ranks):
        tokens = min(2 + rank, spec.max_tokens)
        ids = _draw(spec, tokens, generator, range(spec.num_experts))
        ids[torch.rand(ids.shape, generator=generator) < 0.4] = -1
        ids[0] = -1
        routed.append(ids)
    return routed


def zipf(spec: ExchangeSpec, generator: torch.Generator) -> list[torch.Tensor]:
    """Expert e is drawn with weight 1 / (e + 1): hot experts first."""
    weights = 1.0 / torch.arange(1, spec.num_experts + 1)
    return [
        _draw(spec, spec.max_tokens, generator, range(spec.num_experts), weights)
        for _ in range(spec.num_ranks)
    ]


def single_token(spec: ExchangeSpec, generator: torch.Generator) -> list[torch.Tensor]:
    """One token in the whole group, on the last rank."""
    tokens = [0] * (spec.num_ranks - 1) + [1]
    return [_draw(spec, count, generator, range(spec.num_experts)) for count in tokens]


def nobody(spec: ExchangeSpec, generator: torch.Generator) -> list[torch.Tensor]:
    """No rank has a token: headers travel alone."""
    return [_draw(spec, 0, generator, range(spec.num_experts)) for _ in range(spec.num_ranks)]


def _draw(
    spec: ExchangeSpec,
    tokens: int,
    generator: torch.Generator,
    experts: Sequence[int],
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """[tokens, K] distinct ids of `experts`; where there are fewer than K of them the rest is -1."""
    ids = torch.full((tokens, spec.top_k), -1)
    probabilities = torch.ones(len(experts)) if weights is None else weights
    picks = min(spec.top_k, len(experts))
    for row in ids:
        chosen = torch.multinomial(probabilities, picks, generator=generator)
        row[:picks] = torch.tensor(list(experts))[chosen]
    return ids


Routing = Callable[[ExchangeSpec, torch.Generator], list[torch.Tensor]]
ROUTINGS: dict[str, Routing] = {
    function.__name__: function
    for function in (
        uniform,
        max_tokens,
        all_to_one,
        one_expert,
        empty_rank,
        dropped,
        zipf,
        single_token,
        nobody,
    )
}
