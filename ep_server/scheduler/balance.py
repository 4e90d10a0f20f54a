"""Balance of experts: shares, replicas and moves from measured rows. Pure.

A plan changes shares first, which costs nothing, and loads experts for the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ep_server.scheduler.layer_draft import BalanceLimits, LayerDraft, imbalance
from ep_server.scheduler.placement import Placement, covers_any_loss

__all__ = ["BalanceLimits", "Move", "Plan", "imbalance", "plan_balance", "rank_rows"]


class Move(NamedTuple):
    """An expert to load into a slot that the current placement does not serve from."""

    layer: int
    slot: int
    expert: int


class Plan(NamedTuple):
    """The next placement, and what to load for it beforehand; without a change, the current one."""

    placement: Placement
    moves: tuple[Move, ...]


def plan_balance(
    rows: Sequence[Sequence[float]], placement: Placement, live: Collection[int], limits: BalanceLimits
) -> Plan:
    """Shares, replicas and moves that bring the ranks' rows of each layer closer to their mean.

    The layers that gain the most come first, as far as limits.moves goes; the next plan continues.

    Args:
        rows: by layer, by expert, over a window. Layers with few rows stay as they are, unless their
          imbalance is beyond chance.
        live: ranks that serve. In layers that change, other ranks' copies become spare ones.
    Raises: InternalError if no live rank serves an expert.
    """
    ranks = tuple(sorted(live))
    covered = limits.keep_coverage and covers_any_loss(placement, ranks)
    drafts = [LayerDraft.of(placement, index, counts, ranks, covered) for index, counts in enumerate(rows)]
    left, changed = limits.moves, {}
    for index in sorted(range(len(drafts)), key=lambda index: (-drafts[index].excess(), index)):
        if better := drafts[index].improved(limits, left):
            changed[index] = better
            left -= len(better.loaded)
    return Plan(_with(placement, changed), tuple(_moves(changed)))


def _with(placement: Placement, changed: dict[int, LayerDraft]) -> Placement:
    experts, serves = list(placement.experts), list(placement.serves)
    for index, draft in changed.items():
        experts[index] = tuple(draft.experts)
        serves[index] = draft.reduced_parts()
    return replace(placement, experts=tuple(experts), serves=tuple(serves))


def _moves(changed: dict[int, LayerDraft]) -> Iterator[Move]:
    for index in sorted(changed):
        for slot in sorted(changed[index].loaded):
            yield Move(index, slot, changed[index].experts[slot])


def rank_rows(
    rows: Sequence[float], placement: Placement, layer: int, live: Collection[int]
) -> dict[int, float]:
    """Rows that each live rank gets of a layer, if tokens follow the shares.

    Raises: InternalError if no live rank serves an expert.
    """
    return LayerDraft.of(placement, layer, rows, tuple(sorted(live)), covered=False).loads
