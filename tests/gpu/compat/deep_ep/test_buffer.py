"""Buffer and `import deep_ep` on CUDA tensors, one process per rank; needs GPUs (marker gpu)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import pytest
import torch

from tests.support.exchange import buffer_masks, buffer_programs, gpu_buffer_programs
from tests.support.exchange.buffer_masks import LOSSES, Lost
from tests.support.exchange.process_group import run_group

RANKS = (1, 2, 4)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run(program: Callable[..., Any], num_ranks: int, *args: Any, killed: Collection[int] = ()) -> list[Any]:
    return run_group(program, num_ranks, args=args, timeout=240, killed=killed)


@cache
def results(num_ranks: int) -> dict[str, list[str]]:
    """program -> failure texts of the ranks that failed; one group of processes for all."""
    by_rank = run(buffer_programs.run_programs, num_ranks, "cuda")
    return {
        name: [f"rank {rank}: {answers[name]}" for rank, answers in enumerate(by_rank) if answers[name]]
        for name in by_rank[0]
    }


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("program", [*buffer_programs.PROGRAMS, buffer_programs.LAST])
def test_program_of_any_device(num_ranks: int, program: str) -> None:
    failures = results(num_ranks)[program]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(
    "program",
    [
        "streams",
        "freed_early",
        "order_of_sends",
        "hooks_keep_their_stream",
        "wait_statistics",
        "few_multiprocessors",
        "log_format",
        "graphs_need_memory_first",
        "wrong_ids",
        "profiled",
    ],
)
def test_program(num_ranks: int, program: str) -> None:
    run(getattr(gpu_buffer_programs, program), num_ranks)


@pytest.mark.parametrize("num_gpus", RANKS)  # NCCL lets no two ranks share one
def test_over_nccl(num_gpus: int) -> None:
    run(gpu_buffer_programs.over_nccl, num_gpus)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("hook", [True, False])
def test_graph_replays_with_changing_routing(num_ranks: int, hook: bool) -> None:
    run(gpu_buffer_programs.graphs, num_ranks, hook)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("program", ["masks", "masks_of_all_sizes"])
def test_masks_on_request(num_ranks: int, program: str) -> None:
    run(getattr(buffer_masks, program), num_ranks, "cuda")


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("shrink", [True, False])
def test_a_rank_that_stays_away(num_ranks: int, shrink: bool) -> None:
    run(buffer_masks.a_rank_that_stays_away, num_ranks, "cuda", shrink)


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize(("num_ranks", "losses"), [(n, each) for n, all in LOSSES.items() for each in all])
def test_ranks_are_lost_one_after_the_other(num_ranks: int, losses: Lost, killed: bool) -> None:
    lost = losses.ranks if killed else ()
    run(buffer_masks.shrink, num_ranks, "cuda", killed, losses, killed=lost)
