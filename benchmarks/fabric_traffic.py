"""How many rows a rank moves in one dispatch or combine, in expectation over uniform routing. No times here.

Every token chooses top_k different experts out of `physical`, all sets alike. A unit (rank or host) that owns
s of them is chosen with probability 1 - C(physical - s, top_k) / C(physical, top_k). Combine is the way back.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from math import comb, sqrt
from statistics import NormalDist

MOST = {
    "hosts": 4096,
    "ranks_per_host": 64,
    "tokens": 1 << 20,
    "hidden": 1 << 20,
    "top_k": 64,
    "experts": 1 << 16,
}


class Copies(StrEnum):
    """How often a token's row is sent."""

    EXPERT = "expert"  # to every chosen expert: DeepEP's low-latency kernels
    RANK = "rank"  # once to every rank that owns chosen experts: this exchange without mixed groups
    HOST = "host"  # once over the network to every such host, which spreads it over NVLink


class Inside(StrEnum):
    """What carries rows between the ranks of one host."""

    NVLINK = "nvlink"
    NETWORK = "network"


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes of one exchange. experts: before replication; with more ranks than experts each owns one replica.

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

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise ValueError(f"{name} = {value}: must be 1 to {most}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k = {self.top_k}: must be 1 to experts = {self.experts}")

    @property
    def ranks(self) -> int:
        """R, over all hosts."""
        return self.hosts * self.ranks_per_host

    @property
    def physical(self) -> int:
        """Experts with their replicas."""
        return max(self.experts, self.ranks)


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


def chosen(physical: int, owned: int, top_k: int) -> float:
    """Probability that a token chooses at least one of `owned` experts."""
    return 1 - comb(physical - owned, top_k) / comb(physical, top_k)


@cache
def shares(case: Case) -> tuple[list[int], list[int]]:
    """Physical experts of each rank and of each host: as even as they go."""
    whole, over = divmod(case.physical, case.ranks)
    ranks = [whole + (rank < over) for rank in range(case.ranks)]
    per = case.ranks_per_host
    return ranks, [sum(ranks[at : at + per]) for at in range(0, len(ranks), per)]


def distinct(case: Case) -> tuple[float, float]:
    """Ranks and hosts that a token goes to, its own among them."""
    ranks, hosts = (sum(chosen(case.physical, owned, case.top_k) for owned in each) for each in shares(case))
    return ranks, hosts


def rows(case: Case) -> Rows:
    """What one operation moves."""
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
    physical, top_k = case.physical, case.top_k
    owned = physical / case.ranks
    if case.copies is Copies.EXPERT:  # hypergeometric: experts of this rank among a token's choices
        part = owned / physical
        each = top_k * part * (1 - part) * (physical - top_k) / max(physical - 1, 1)
        return sqrt(case.tokens * away * each)
    ranks, hosts = shares(case)
    if case.copies is Copies.HOST and case.inside is Inside.NVLINK:
        hit = chosen(physical, hosts[0], top_k) / case.ranks_per_host  # a token's row lands on one of them
    else:
        hit = chosen(physical, ranks[0], top_k)
    return sqrt(case.tokens * away * hit * (1 - hit))
