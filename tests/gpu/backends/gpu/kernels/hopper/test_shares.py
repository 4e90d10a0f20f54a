"""The cuts of contexts into shares, against the same in Python."""

from __future__ import annotations

import pytest
import torch

from ep_server.backends.gpu.kernels.hopper.shares import ContextShares

pytestmark = pytest.mark.gpu
Share = tuple[int, ...]  # sequence, length, slot, first, last, number, of


def cut(lengths: list[int], heads: int, teams: int, tile: int, least: int) -> ContextShares:
    given = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    slots = torch.arange(len(lengths), dtype=torch.int32, device="cuda") * 7
    torch.cuda.synchronize()
    made = ContextShares(given, slots, kv_heads=heads, group=1, dim=1, teams=teams, tile=tile, least=least)
    torch.cuda.synchronize()
    return made


def wanted(lengths: list[int], heads: int, teams: int, tile: int, least: int) -> list[Share]:
    tiles = [-(-max(n, 0) // tile) for n in lengths]
    even = -(-sum(tiles) * heads // teams)
    sizes = range(max(even, least), 2 * even, max(-(-even // 4), 1))
    at_once = (n for n in sizes if heads * sum(shares_of(count, n) for count in tiles) <= teams)
    share = next(at_once, max(even, least))
    whole, several = [], []
    for s, (length, count) in enumerate(zip(lengths, tiles, strict=True)):
        of = shares_of(count, share)
        for n in range(of):
            one = (s, max(length, 0), 7 * s, count * n // of, count * (n + 1) // of, n, of)
            (several if of > 1 else whole).append(one)
    return several + whole


def shares_of(tiles: int, share: int) -> int:
    return max((2 * tiles + share) // (2 * share), 1)


@pytest.mark.parametrize(("heads", "teams"), [(4, 132), (1, 1056), (8, 264), (16, 7), (3, 100)])
@pytest.mark.parametrize(("tile", "least"), [(16, 16), (16, 1), (64, 4)])
@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [0, -1, 0],
        [32768],
        [512] * 31 + [16384],
        [100000, 7, 0, 5000] * 3,
        [300 + n % 7 for n in range(511)] + [40000],
        [(n * n * 37) % 9000 for n in range(1300)],  # more than threads
    ],
    ids=lambda lengths: f"{len(lengths)}-{max(lengths)}",
)
def test_shares(lengths: list[int], heads: int, teams: int, tile: int, least: int) -> None:
    made = cut(lengths, heads, teams, tile, least)
    expected = wanted(lengths, heads, teams, tile, least)
    total = int(made.counts[0])
    assert [tuple(row) for row in made.at[:total, :7].tolist()] == expected
    assert not made.counts[1:].any()
    assert heads * sum(share[6] > 1 for share in expected) <= 2 * teams
    assert total <= len(made.at)
