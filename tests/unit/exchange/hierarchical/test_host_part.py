"""What of an operation stays on a host, and the order of what came from it and from others; against loops."""

from __future__ import annotations

import random

import pytest
import torch

from ep_server.errors import ConfigError
from ep_server.exchange.api import ExchangeSpec, Received, View
from ep_server.exchange.fabric.host_staging import ReceivedRows
from ep_server.exchange.hierarchical.host_part import (
    IdSplit,
    InterTables,
    join,
)
from ep_server.exchange.spec import experts_of, ranks_of_host, spec_of_host

CPU = torch.device("cpu")
PLACEMENT = (3, 0, 1, 2, 1, 4, 2, 0)


def spec_of(rank: int, placement: tuple[int, ...] = PLACEMENT) -> ExchangeSpec:
    return ExchangeSpec(rank, 5, placement, max_tokens=4, hidden=8, top_k=3)


def test_ranks_and_experts_of_a_host_are_counted_from_zero_there() -> None:
    hosts = (7, 3, 3, 9, 9)
    ranks = ranks_of_host(hosts, spec_of(2))
    assert ranks == range(1, 3)
    assert experts_of(spec_of(2), ranks) == (2, 3, 4, 6)
    intra = spec_of_host(spec_of(2), ranks)
    assert (intra.rank, intra.num_ranks, intra.placement) == (1, 2, (0, 1, 0, 1))
    assert (intra.max_tokens, intra.hidden, intra.top_k) == (4, 8, 3)
    mine = [experts_of(spec_of(2), ranks)[e] for e in intra.local_experts]
    assert tuple(mine) == spec_of(2).local_experts


def test_a_host_without_experts_has_one_that_nobody_is_sent_to() -> None:
    bare = spec_of(0, (1, 2, 3, 4))
    ranks = ranks_of_host((0, 1, 1, 1, 1), bare)
    assert spec_of_host(bare, ranks).placement == (0,)
    intra, inter = IdSplit(bare, ranks, CPU)(torch.tensor([[0, 3, -1]]))
    assert intra.tolist() == [[-1, -1, -1]]
    assert inter.tolist() == [[0, 3, -1]]


@pytest.mark.parametrize("hosts", [(0, 1, 0, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0, -1)])
def test_hosts_whose_ranks_are_apart_or_missing_are_refused(hosts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="hosts"):
        ranks_of_host(hosts, spec_of(0))


def test_every_choice_is_in_one_part_and_bad_ids_are_bad_in_both() -> None:
    split = IdSplit(spec_of(1), range(1, 3), CPU)
    intra, inter = split(torch.tensor([[0, 2, 4], [6, -1, 5], [-2, 8, 10**12], [-(10**12), 3, 7]]))
    assert intra.tolist() == [[-1, 0, 2], [3, -1, -1], [-2, 4, 4], [-2, 1, -1]]
    assert inter.tolist() == [[0, -1, -1], [-1, -1, 5], [-2, 8, 8], [-2, -1, 7]]
    assert intra.is_contiguous() and inter.is_contiguous()
    for each in split(torch.empty(0, 3, dtype=torch.int64)):
        assert each.shape == (0, 3)


@pytest.mark.parametrize("view", View)
@pytest.mark.parametrize("seed", range(6))
def test_joined_rows_are_ordered_by_expert_source_and_token(view: View, seed: int) -> None:
    """Ranks 1 and 2 of five share a host; rows of others are in the region of either."""
    drawn, experts, tokens, ranks = random.Random(seed), 3, 4, range(1, 3)
    entries = sorted(
        (expert, source, token)
        for expert in range(experts)
        for source in range(5)
        for token in range(tokens)
        if drawn.random() < (0.0, 0.3, 1.0)[seed % 3]
    )
    region, gateways = 5 * tokens + 7, [drawn.randrange(2) for _ in range(5)]
    intra = [entry for entry in entries if entry[1] in ranks]
    inter = [entry for entry in entries if entry[1] not in ranks]
    inter_ids = torch.tensor([gateways[s] * region + s * tokens + t for _, s, t in inter], dtype=torch.int64)
    inner = Received(torch.empty(region + 5 * tokens, 1), *counted(inter, experts), None, row_ids=inter_ids)
    used, entry = torch.unique(inter_ids, return_inverse=True)
    tables = InterTables(spec_of(1), ranks)(inner, entry)
    # Inside a host ids count from any bank: only their number matters here.
    here = Received(torch.empty(0), *counted(intra, experts + 1), None, row_ids=torch.arange(len(intra)))
    joined = join(here, ReceivedRows(inner.counts, tables, []), view)
    rows = [("intra", entry) for entry in intra] + [("inter", int(row)) for row in used]
    wanted = [
        ("intra", e) if e[1] in ranks else ("inter", gateways[e[1]] * region + e[1] * tokens + e[2])
        for e in entries
    ]
    assert [rows[row] for row in joined.order.entry] == wanted
    assert [entries[i] for i in joined.intra_at] == intra
    assert [entries[i] for i in joined.inter_at] == inter
    counts, offsets = counted(entries, experts)
    assert torch.equal(joined.order.counts, counts)
    assert torch.equal(joined.order.offsets, offsets)
    if view is View.PADDED:
        assert joined.order.experts.tolist() == [e for e, _, _ in entries]
        places = [i - int(offsets[e]) for i, (e, _, _) in enumerate(entries)]
        assert joined.order.positions.tolist() == places


def counted(entries: list[tuple[int, int, int]], experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and offsets."""
    counts = torch.bincount(torch.tensor([e for e, _, _ in entries], dtype=torch.int64), minlength=experts)
    return counts.int(), torch.cat([counts.new_zeros(1), counts.cumsum(0)])
