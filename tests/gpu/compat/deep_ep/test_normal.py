"""DeepEP's high-throughput calls on CUDA tensors, one process per rank; needs GPUs (marker gpu)."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from ep_server.compat import deep_ep
from tests.support.exchange import gpu_normal, normal_losses, normal_programs
from tests.support.exchange.process_group import run_group
from tests.support.fabric.fabric_ends import loopback, needs, usable

RANKS = (1, 2, 4)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@cache
def results(num_ranks: int) -> dict[str, list[str]]:
    """program -> failure texts of the ranks that failed; one group of processes for all."""
    by_rank = run_group(normal_programs.run_programs, num_ranks, args=("cuda",), timeout=240)
    return {
        name: [f"rank {rank}: {answers[name]}" for rank, answers in enumerate(by_rank) if answers[name]]
        for name in by_rank[0]
    }


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("program", normal_programs.PROGRAMS)
def test_program_of_any_device(num_ranks: int, program: str) -> None:
    failures = results(num_ranks)[program]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("program", ["captured", "streams", "many_rows"])
def test_program(num_ranks: int, program: str) -> None:
    run_group(getattr(gpu_normal, program), num_ranks, timeout=240)


@pytest.mark.parametrize(("num_ranks", "hosts"), [(2, (0, 1)), (4, (0, 0, 1, 1))])
def test_ranks_of_several_hosts(num_ranks: int, hosts: tuple[int, ...]) -> None:
    """The loopback between what counts as hosts."""
    library = next((name for name in ("wheel", "system") if not usable(name)), "system")
    needs(library)
    args = ("cuda", deep_ep.Network(hosts, loopback(library)))
    by_rank = run_group(normal_programs.run_programs, num_ranks, args=args, timeout=240)
    failures = [f"{name}: {text}" for answers in by_rank for name, text in answers.items() if text]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_a_rank_that_does_not_call(call: str) -> None:
    run_group(normal_losses.stays_away, 2, args=("cuda", call), timeout=240)
