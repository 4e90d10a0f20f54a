"""One suite for every implementation of the exchange: each must return the bits that paper arithmetic gives.

Both implementations are held to the same expected bits, so they are identical to one another. A group of
processes is spawned once per implementation and R; it runs all cases, and each test reads its own result.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch.distributed as dist

from ep_server.ep import bootstrap
from ep_server.ep.exchange import Exchange, ExchangeSpec
from ep_server.ep.reference import ReferenceExchange
from tests.ep.conformance import Factory, case_names, run_cases
from tests.ep.sequences import run_sequences, sequence_names
from tests.harness.process_group import run_group

IMPLEMENTATIONS = ("reference", "native")
RANKS = (1, 2, 4)


def _factory(implementation: str) -> Factory:
    if implementation == "reference":
        return _reference
    return _native


def _native(spec: ExchangeSpec, group: dist.ProcessGroup) -> Exchange:
    return bootstrap.from_process_group(group, spec)


def _reference(spec: ExchangeSpec, group: dist.ProcessGroup) -> Exchange:
    return ReferenceExchange(spec, group if spec.num_ranks > 1 else None)


def _run_rank(group: dist.ProcessGroup, implementation: str) -> dict[str, str]:
    factory = _factory(implementation)
    return run_cases(group, factory) | run_sequences(group, factory)


@cache
def results(implementation: str, num_ranks: int) -> dict[str, list[str]]:
    """name -> failure texts of the ranks that failed; one group of processes for all."""
    by_rank = run_group(_run_rank, num_ranks, args=(implementation,), timeout=90)
    return {
        name: [f"rank {rank}: {answers[name]}" for rank, answers in enumerate(by_rank) if answers[name]]
        for name in by_rank[0]
    }


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestConformance:
    @pytest.mark.parametrize("case", case_names())
    def test_case(self, implementation: str, num_ranks: int, case: str) -> None:
        failures = results(implementation, num_ranks)[case]
        assert not failures, "\n".join(failures)

    @pytest.mark.parametrize("sequence", sequence_names())
    def test_sequence(self, implementation: str, num_ranks: int, sequence: str) -> None:
        failures = results(implementation, num_ranks)[sequence]
        assert not failures, "\n".join(failures)
