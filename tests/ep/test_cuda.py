"""The exchange over NVLink against the conformance suite and its own failures; needs GPUs (marker gpu)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from tests.ep.conformance import case_names
from tests.ep.sequences import sequence_names

RANKS = (1, 2, 4)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NAMES = [f"fused-{name}" for name in case_names()] + case_names() + sequence_names()


def run(program: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 240) -> list[Any]:
    from tests.harness.process_group import run_group

    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    return run_group(program, num_ranks, args=args, timeout=timeout)


@cache
def results(num_ranks: int) -> dict[str, list[str]]:
    """name -> failure texts of the ranks that failed; one group of processes for all."""
    from tests.ep import gpu_programs

    by_rank = run(gpu_programs.conformance, num_ranks)
    return {
        name: [f"rank {rank}: {answers[name]}" for rank, answers in enumerate(by_rank) if answers[name]]
        for name in by_rank[0]
    }


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_conformance(num_ranks: int, name: str) -> None:
    failures = results(num_ranks)[name]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("program", ["side_by_side", "refused"])
def test_program(num_ranks: int, program: str) -> None:
    from tests.ep import gpu_programs

    run(getattr(gpu_programs, program), num_ranks)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_graph_replays_with_changing_routing(num_ranks: int) -> None:
    from tests.ep import gpu_programs

    run(gpu_programs.graph_replays, num_ranks, 400)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("program", ["failures", "masking"])
def test_a_rank_that_does_not_come(num_ranks: int, program: str) -> None:
    from tests.ep import gpu_programs

    run(getattr(gpu_programs, program), num_ranks)
