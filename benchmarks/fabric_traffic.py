"""How many rows a rank moves in one dispatch or combine, in expectation over uniform routing. No times here.

Every token chooses top_k different experts out of n, all sets alike: a unit (rank or host) that owns s of
them is chosen with probability 1 - C(n - s, top_k) / C(n, top_k). n is all experts or, where routing is
limited to groups, those of the groups it keeps, all sets of groups alike. Experts lie in order. Combine is
the way back.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from itertools import pairwise
from math import comb, sqrt
from statistics import NormalDist

MOST = {
    "hosts": 4096,
    "ranks_per_host": 64,
    "tokens": 1 << 20,
    "hidden": 1 << 20,
    "top_k": 64,
    "experts": 1 << 16,
    "groups": 1 << 10,
    "kept": 1 << 10,
}


class Copies(StrEnum):
    """How often a token's row is sent, and how many come back."""

    EXPERT = "expert"  # to every chosen expert: DeepEP's low-latency kernels
    RANK = "rank"  # once to every rank that owns chosen experts, and a sum from each
    HOST = "host"  # once over the network to every such host, spread there over NVLink; a sum from each rank
    HOST_SUM = "host-sum"  # the same, and one sum from each host: another order of additions


class Inside(StrEnum):
    """What carries rows between the ranks of one host."""

    NVLINK = "nvlink"
    NETWORK = "network"


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes of one exchange. experts: before replication; with more ranks than experts each owns one replica.

    groups, kept: a token's experts come from `kept` of `groups` equal groups of experts.
    Raises: ValueError naming the field, its value and what is allowed.
    """

    hosts: int = 8
    ranks_per_host: int = 8
    tokens: int = 128
    hidden: int = 7168
    top_k: int = 8
    experts: int = 256
    copies: Copies = Copies.HOST
    inside: Inside = Inside.NVLINK
    groups: int = 1
    kept: int = 1

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise ValueError(f"{name} = {value}: must be 1 to {most}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k = {self.top_k}: must be 1 to experts = {self.experts}")
        if self.physical % self.groups:
            raise ValueError(f"groups = {self.groups}: must divide the {self.physical} experts")
        if self.kept > self.groups:
            raise ValueError(f"kept = {self.kept}: must be 1 to groups = {self.groups}")
        if self.eligible < self.top_k:
            raise ValueError(f"kept = {self.kept}: must leave at least top_k = {self.top_k} experts")

    @property
    def ranks(self) -> int:
        """R, over all hosts."""
        return self.hosts * self.ranks_per_host

    @property
    def physical(self) -> int:
        """Experts with their replicas."""
        return max(self.experts, self.ranks)

    @property
    def eligible(self) -> int:
        """Experts of the groups that a token keeps."""
        return self.physical // self.groups * self.kept


@dataclass(frozen=True, slots=True)
class Rows:
    """What the average rank sends per operation, which is also what it receives.

    network: rows over its NIC. nvlink: rows straight to ranks of its host. forwarded: rows that came over the
      network and go on over NVLink. peers: ends over the network that get a header.
    busiest: rows that come over the network to the busiest rank / to the average one, expected.
    """

    network: float
    nvlink: float
    forwarded: float
    peers: int
    busiest: float


def parts(case: Case, unit: range) -> list[int]:
    """How many experts of each group it touches a unit owns."""
    size = case.physical // case.groups
    touched = range(unit.start // size, -(-unit.stop // size))
    return [min(unit.stop, (g + 1) * size) - max(unit.start, g * size) for g in touched]


def chosen(case: Case, unit: range) -> float:
    """Probability that a token chooses at least one of a unit's experts."""
    owned = parts(case, unit)
    ways = Counter({(0, 0): 1})  # (groups kept of those it touches, its experts in them) -> sets of groups
    for count in owned:
        for (kept, experts), number in list(ways.items()):
            ways[kept + 1, experts + count] += number
    none = sum(
        number * comb(case.groups - len(owned), case.kept - kept) * comb(case.eligible - experts, case.top_k)
        for (kept, experts), number in ways.items()
        if kept <= case.kept
    )
    return 1 - none / (comb(case.groups, case.kept) * comb(case.eligible, case.top_k))


def units(case: Case) -> tuple[list[range], list[range]]:
    """Experts of each rank and of each host: as even as they go."""
    whole, over = divmod(case.physical, case.ranks)
    starts = [rank * whole + min(rank, over) for rank in range(case.ranks + 1)]
    per = case.ranks_per_host
    ranks = [range(*each) for each in pairwise(starts)]
    return ranks, [range(each[0].start, each[-1].stop) for each in batches(ranks, per)]


def batches(ranks: list[range], per: int) -> list[list[range]]:
    """Of so many each."""
    return [ranks[at : at + per] for at in range(0, len(ranks), per)]


def distinct(case: Case) -> tuple[float, float]:
    """Ranks and hosts that a token goes to, its own among them."""
    return _distinct(replace(case, tokens=1, hidden=1, copies=Copies.RANK, inside=Inside.NVLINK))


@cache
def _distinct(case: Case) -> tuple[float, float]:
    ranks, hosts = (sum(chosen(case, unit) for unit in each) for each in units(case))
    return ranks, hosts


def both_ways(case: Case) -> tuple[Case, Case]:
    """Dispatch and combine as cases of rows(); HOST is then what passes through one rank of each host."""
    out = Copies.HOST if case.copies is Copies.HOST_SUM else case.copies
    back = {Copies.HOST: Copies.RANK, Copies.HOST_SUM: Copies.HOST}.get(case.copies, case.copies)
    return replace(case, copies=out), replace(case, copies=back)


def rows(case: Case) -> Rows:
    """What one operation moves; a case of both_ways()."""
    to_ranks, to_hosts = distinct(case)
    if case.copies is Copies.EXPERT:
        to_ranks = to_hosts = float(case.top_k)  # every copy is a row; evenly spread over ranks and hosts
    elsewhere = 1 - 1 / case.hosts
    beside = to_ranks * (1 / case.hosts - 1 / case.ranks)  # to the other ranks of the own host
    away = to_ranks * elsewhere
    network = to_hosts * elsewhere if case.copies is Copies.HOST else away
    forwarded = away - network
    peers = case.hosts - 1 if case.copies is Copies.HOST else case.ranks - case.ranks_per_host
    if case.inside is Inside.NETWORK:
        network, beside, peers = network + beside + forwarded, 0.0, case.ranks - 1
        forwarded = 0.0
    count = case.tokens
    return Rows(network * count, beside * count, forwarded * count, peers, busiest(case, network * count))


def busiest(case: Case, mean: float) -> float:
    """Rows that come to the busiest of R ranks over `mean`: largest of R normal draws, by Blom's score."""
    if mean == 0 or case.ranks == 1:
        return 1.0
    score = NormalDist().inv_cdf((case.ranks - 0.375) / (case.ranks + 0.25))
    return 1 + score * deviation(case) / mean


def deviation(case: Case) -> float:
    """Standard deviation of the rows that come to one rank over the network."""
    away = case.ranks - (1 if case.inside is Inside.NETWORK else case.ranks_per_host)
    ranks, hosts = units(case)
    if case.copies is Copies.EXPERT:
        return sqrt(case.tokens * away * copies_variance(case, ranks[0]))
    if case.copies is Copies.HOST and case.inside is Inside.NVLINK:
        hit = chosen(case, hosts[0]) / case.ranks_per_host  # a token's row lands on one of them
    else:
        hit = chosen(case, ranks[0])
    return sqrt(case.tokens * away * hit * (1 - hit))


def copies_variance(case: Case, unit: range) -> float:
    """Variance of how many of a unit's experts one token chooses, from how often it chooses two of them."""
    owned, n, groups, kept = parts(case, unit), case.eligible, case.groups, case.kept
    two = case.top_k * (case.top_k - 1) / (n * (n - 1)) if n > 1 else 0.0  # if both are eligible
    alike = sum(count * (count - 1) for count in owned) * kept / groups
    across = (sum(owned) ** 2 - sum(count**2 for count in owned)) * kept * (kept - 1)
    across /= max(groups * (groups - 1), 1)
    mean = len(unit) * case.top_k / case.physical
    return two * (alike + across) + mean - mean**2
