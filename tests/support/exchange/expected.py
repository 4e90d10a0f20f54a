"""What an exchange must return, written as loops over tokens: a second opinion, independent of any exchange.

Knows the inputs of all ranks (routing.py) and the order of arithmetic of ep.exchange; uses no
communication and no gathered tensors.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from ep_server.exchange.api import ExchangeSpec, Reduction
from ep_server.exchange.quant import FP8, dequantise, quantise
from ep_server.exchange.validate import input_dtype
from tests.support.exchange.routing import Inputs


@dataclass(frozen=True)
class Expected:
    """Of one rank: entries (local expert, source, token) in row order, wire rows and scales, the result."""

    entries: list[tuple[int, int, int]]
    rows: torch.Tensor
    scales: torch.Tensor | None
    combined: torch.Tensor


def expert(row: torch.Tensor, expert_id: int, dtype: torch.dtype) -> torch.Tensor:
    """What the test's experts compute: another factor each, of alternating sign. row: [..., H] float32."""
    factor = (1.0 + expert_id / 16) * (-1 if expert_id % 2 else 1)
    return (row * factor).to(dtype)


def expect(spec: ExchangeSpec, inputs: list[Inputs], intra: Collection[int] = ()) -> Expected:
    """Runs one dispatch, experts and combine of rank `spec.rank` on paper.

    Args:
        intra: ranks whose answers are summed apart from those of the others, and rounded; none: all together.
    """
    wire = [_wire(spec, each.x) for each in inputs]
    entries = [
        (local, source, token)
        for local, expert_id in enumerate(spec.local_experts)
        for source, each in enumerate(inputs)
        for token, ids in enumerate(each.ids.tolist())
        if expert_id in ids
    ]
    rows = [wire[source][0][token] for _, source, token in entries]
    scales = [wire[source][1][token] for _, source, token in entries]
    codes, scale_rows = wire[spec.rank]
    return Expected(
        entries=entries,
        rows=torch.stack(rows) if rows else codes.new_empty(0, spec.hidden),
        scales=None
        if spec.payload not in FP8
        else (torch.stack(scales) if scales else scale_rows.new_empty(0, scale_rows.shape[1])),
        combined=_combined(spec, inputs[spec.rank], (codes, scale_rows), intra),
    )


def _wire(spec: ExchangeSpec, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return quantise(x, spec.payload) if spec.payload in FP8 else (x, x.new_empty(len(x), 0))


def _combined(
    spec: ExchangeSpec, mine: Inputs, wire: tuple[torch.Tensor, torch.Tensor], intra: Collection[int]
) -> torch.Tensor:
    dtype, (codes, scales) = input_dtype(spec), wire
    result = torch.zeros(len(codes), spec.hidden, dtype=dtype)
    for token, ids in enumerate(mine.ids.tolist()):
        row = codes[token].float()
        if spec.payload in FP8:
            row = dequantise(codes[token : token + 1], scales[token : token + 1])[0]
        terms = [
            (spec.placement[e], mine.weights[token, k] * expert(row, e, dtype).float())
            for k, e in enumerate(ids)
            if e >= 0
        ]
        if not intra:
            result[token] = _sum(spec, terms)
            continue
        here, there = (
            _sum(spec, [t for t in terms if (t[0] in intra) is inside]) for inside in (True, False)
        )
        result[token] = (here.float() + there.float()).to(dtype)
    return result


def _sum(spec: ExchangeSpec, terms: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Of (rank, weighted answer), rounded."""
    dtype, total = input_dtype(spec), torch.zeros(spec.hidden)
    if spec.reduction is Reduction.SOURCE:
        for _, term in terms:
            total += term
        return total.to(dtype)
    for rank in range(spec.num_ranks):
        partial = torch.zeros(spec.hidden)
        for owner, term in terms:
            if owner == rank:
                partial += term
        total += partial.to(dtype).float()
    return total.to(dtype)
