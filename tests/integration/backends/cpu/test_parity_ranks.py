"""The same tokens as transformers' with the experts spread over ranks, through both exchanges.

One group of processes runs all families one after the other; every rank decodes its own prompts, one rank
has none, one owns no expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch.distributed as dist

from ep_server.backends.assembly import LoadParams, load_model
from ep_server.exchange.api import Exchange, ExchangeSpec, Payload, Reduction
from ep_server.testing.reference_exchange import ReferenceExchange
from tests.support.exchange.process_group import run_group
from tests.support.exchange.ranks import run_ranks
from tests.support.models.checkpoints import CASES, EXPERTS, HIDDEN, NEW_TOKENS, TOP_K, Tiny
from tests.support.models.driver import generate, runner

Tokens = list[tuple[int, ...]]


@dataclass(frozen=True)
class Group:
    """placement: owner of each expert. prompts: which prompts each rank decodes."""

    exchange: str
    placement: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]
    reduction: Reduction = Reduction.RANK
    micro_batches: int = 1
    new_tokens: int = NEW_TOKENS

    @property
    def num_ranks(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class Job:
    path: str
    prompts: tuple[tuple[int, ...], ...]


TWO, UNEVEN = (0, 0, 0, 1, 1, 1), (3, 0, 1, 1, 0, 3)
GROUPS = {
    "native-1": Group("native", (0,) * EXPERTS, ((0, 1, 2, 3),), micro_batches=2),
    "native-2": Group("native", TWO, ((0, 3), (1, 2)), micro_batches=2),
    "native-4": Group("native", UNEVEN, ((0, 1), (), (2,), (3,)), new_tokens=16),
    "reference-2": Group("reference", TWO, ((0, 3), (1, 2)), new_tokens=16),
    "native-4-source": Group("native", UNEVEN, ((0, 1), (), (2,), (3,)), Reduction.SOURCE, micro_batches=2),
    "reference-4": Group("reference", UNEVEN, ((0, 1), (), (2,), (3,)), micro_batches=2),
}
SLOW = ("native-4-source", "reference-4")


@pytest.mark.parametrize("group", [pytest.param(g, marks=[pytest.mark.slow] * (g in SLOW)) for g in GROUPS])
def test_tokens_of_every_family(tiny: Callable[[str], Tiny], group: str) -> None:
    made = [tiny(case.name) for case in CASES]
    per_rank = run(GROUPS[group], [Job(str(one.path), one.prompts) for one in made])
    found = {one.case.name: [tokens[i] for tokens in per_rank] for i, one in enumerate(made)}
    count = GROUPS[group].new_tokens
    assert found == {
        one.case.name: [[one.tokens[i][:count] for i in own] for own in GROUPS[group].prompts] for one in made
    }


def run(group: Group, jobs: list[Job]) -> list[list[Tokens]]:
    if group.exchange == "native":
        spec = {key: getattr(_spec(group, 0), key) for key in _FIELDS}
        return run_ranks(_on_native, group.num_ranks, spec, args=(group, jobs), timeout=240.0)
    return run_group(_on_reference, group.num_ranks, args=(group, jobs), timeout=240.0)


_FIELDS = ("placement", "max_tokens", "hidden", "top_k", "payload", "reduction")


def _spec(group: Group, rank: int) -> ExchangeSpec:
    return ExchangeSpec(
        rank, group.num_ranks, group.placement, 64, HIDDEN, TOP_K, Payload.FP32, group.reduction
    )


def _on_reference(world: dist.ProcessGroup, group: Group, jobs: list[Job]) -> list[Tokens]:
    return _decode(ReferenceExchange(_spec(group, world.rank()), world), group, jobs)


def _on_native(exchange: Exchange, group: Group, jobs: list[Job]) -> list[Tokens]:
    return _decode(exchange, group, jobs)


def _decode(exchange: Exchange, group: Group, jobs: list[Job]) -> list[Tokens]:
    rank = exchange.spec.rank
    assert len(group.placement) == EXPERTS
    results = []
    for job in jobs:
        model = load_model(LoadParams(job.path, rank, group.placement, "float32"))
        own = [job.prompts[i] for i in group.prompts[rank]]
        results.append(
            generate(
                runner(model, exchange),
                own,
                group.new_tokens,
                micro_batches=group.micro_batches,
                steps=group.new_tokens + 2,  # the last two with nothing to run on any rank
            )
        )
    return results
