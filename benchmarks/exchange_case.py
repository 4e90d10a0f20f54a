"""One case of the exchange benchmark on GPUs: sizes, routing, inputs, and the sums that must come out.

Knows no GPU. Inputs are drawn from seeds, so every rank can rebuild those of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ep_server.exchange.api import ExchangeSpec, Payload
from ep_server.exchange.quant import dequantise, quantise

ROUTINGS = ("uniform", "zipf", "one", "spare")
FORMS = ("own", "deepep")


@dataclass(frozen=True)
class Case:
    """form: own = weights at dispatch; deepep = weights only at combine. num_sms: 0 = all.

    routing: spare = uniform, and every rank has as many expert slots again, for which no rows come.
    """

    ranks: int
    tokens: int
    hidden: int = 7168
    top_k: int = 8
    experts: int = 256
    payload: str = "fp8"
    routing: str = "uniform"
    form: str = "own"
    wire: str = "bf16"
    num_sms: int = 0
    replays: int = 300

    @property
    def placement(self) -> tuple[int, ...]:
        return tuple(rank for rank in self._owners for _ in range(self._slots))

    @property
    def serving(self) -> torch.Tensor:
        """[E] int64: the slot of each expert."""
        return torch.arange(self.experts) * self._slots

    @property
    def _owners(self) -> tuple[int, ...]:
        return tuple(e * self.ranks // self.experts for e in range(self.experts))

    @property
    def _slots(self) -> int:
        return 2 if self.routing == "spare" else 1

    def spec(self, rank: int) -> ExchangeSpec:
        return ExchangeSpec(
            rank, self.ranks, self.placement, self.tokens, self.hidden, self.top_k, Payload(self.payload),
            num_banks=2,
        )  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    x: torch.Tensor  # [T, H] bfloat16
    ids: torch.Tensor  # [T, K] int64
    weights: torch.Tensor  # [T, K] float32

    @staticmethod
    def of(case: Case, rank: int) -> Inputs:
        g = torch.Generator().manual_seed(4057 + rank)
        if case.routing == "zipf":
            share = (1.0 / torch.arange(1, case.experts + 1)).expand(case.tokens, -1)
            ids = torch.multinomial(share, case.top_k, generator=g)
        else:  # "one": only experts of rank 0
            among = case.experts // (case.ranks if case.routing == "one" else 1)
            ids = case.serving[torch.rand(case.tokens, among, generator=g).topk(case.top_k).indices]
        x = torch.randn(case.tokens, case.hidden, generator=g).to(torch.bfloat16)
        return Inputs(x, ids, torch.rand(case.tokens, case.top_k, generator=g))


def factors(case: Case) -> torch.Tensor:
    """By slot: what each expert multiplies a row by."""
    return 1 + torch.arange(len(case.placement)) / 64


def rows_between(case: Case) -> torch.Tensor:
    """[source, destination] int64: rows that a dispatch sends, each token once to a rank."""
    owner = torch.tensor(case.placement)
    table = torch.zeros(case.ranks, case.ranks, dtype=torch.int64)
    for source in range(case.ranks):
        owners = owner[Inputs.of(case, source).ids]
        for d in range(case.ranks):
            table[source, d] = (owners == d).any(1).sum()
    return table


@dataclass(frozen=True)
class Wanted:
    exact: torch.Tensor  # [T, H] bfloat16: what BF16 answers give, bit by bit
    sums: torch.Tensor  # [T, H] float64: the same sums with nothing rounded on the way back


def wanted(case: Case, rank: int) -> Wanted:
    """What a pair must give this rank, on paper; experts answer in BF16."""
    mine, fp8 = Inputs.of(case, rank), case.payload != "bf16"
    rows = dequantise(*quantise(mine.x, Payload(case.payload))) if fp8 else mine.x.float()
    owners = torch.tensor(case.placement)[mine.ids]
    partial = torch.zeros(case.ranks, case.tokens, case.hidden)
    sums = torch.zeros(case.tokens, case.hidden, dtype=torch.float64)
    for k in range(case.top_k):
        answer = (rows * factors(case)[mine.ids[:, k], None]).to(torch.bfloat16)
        term = mine.weights[:, k, None] * answer.float()
        sums += mine.weights[:, k, None].double() * answer.double()
        for r in range(case.ranks):
            partial[r] += torch.where((owners[:, k] == r)[:, None], term, torch.zeros(()))
    total = torch.zeros(case.tokens, case.hidden)
    for r in range(case.ranks):
        total += partial[r].to(torch.bfloat16).float()
    return Wanted(total.to(torch.bfloat16), sums)
