"""The exchange over NVLink against the conformance suite and its own failures; needs GPUs (marker gpu).

The programs import the CUDA part, which only a machine with a driver can: they are imported when they run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.exchange.conformance import case_names
from tests.support.exchange.gpu_sizes import size_names
from tests.support.exchange.killed_rank import DEATHS, check_grown, check_killed, check_replaced
from tests.support.exchange.sequences import sequence_names
from tests.support.gpus import shared_by

RANKS = (1, 2, 4)
GROUPS = (2, 4)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NAMES = [f"fused-{name}" for name in case_names()] + case_names() + sequence_names()
REPLAYS, SHARED_REPLAYS = 10_000, 200  # where ranks share a GPU each operation waits for turns on it
OVERLAPPED = 2_000  # replays of two micro-batches
LOOSE_NS = 1_000_000  # far more than clocks of two GPUs are measured wrong


def program(name: str) -> Callable[..., Any]:
    """`module.function` of tests.support.exchange."""
    module, _, function = name.partition(".")
    found: Callable[..., Any] = getattr(importlib.import_module(f"tests.support.exchange.{module}"), function)
    return found


def run(name: str, num_ranks: int, *args: Any, timeout: float = 240) -> list[Any]:
    from tests.support.exchange.process_group import run_group

    return run_group(program(name), num_ranks, args=args, timeout=timeout)


def failures(name: str, num_ranks: int, cases: list[str]) -> list[str]:
    """Of all ranks; asserts that the program ran all these cases."""
    by_rank = run(name, num_ranks)
    assert all(set(answers) == set(cases) for answers in by_rank)
    return [
        f"rank {rank}, {case}: {text}"
        for rank, answers in enumerate(by_rank)
        for case, text in answers.items()
        if text
    ]


@pytest.mark.parametrize("num_ranks", RANKS)
def test_conformance(num_ranks: int) -> None:
    found = failures("gpu_programs.conformance", num_ranks, NAMES)
    assert not found, "\n".join(found[:5])


@pytest.mark.parametrize("num_ranks", GROUPS)
def test_many_rows_of_steps(num_ranks: int) -> None:
    by_rank = run("gpu_many.cases", num_ranks)
    found = [
        f"{rank}, {case}: {text}" for rank, all in enumerate(by_rank) for case, text in all.items() if text
    ]
    assert len(by_rank[0]) > 50
    assert not found, "\n".join(found[:5])


@pytest.mark.parametrize("program", ["turns", "refused", "replayed", "measurements"])
def test_many_and_few_rows(program: str) -> None:
    run(f"gpu_many.{program}", 2)


@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_a_rank_lost_with_many_rows(call: str) -> None:
    run("gpu_many.lost", 3, call)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_sizes(num_ranks: int) -> None:
    found = failures("gpu_programs.run_sizes", num_ranks, size_names())
    assert not found, "\n".join(found[:5])


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("name", ["side_by_side", "refused", "measurements"])
def test_program(num_ranks: int, name: str) -> None:
    run(f"gpu_programs.{name}", num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", RANKS)
def test_graph_replays_with_changing_routing(num_ranks: int) -> None:
    run("gpu_programs.graph_replays", num_ranks, SHARED_REPLAYS if shared_by(num_ranks) else REPLAYS)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("name", ["orders_of_receives", "freed_handles", "beside_a_gemm"])
def test_streams(num_ranks: int, name: str) -> None:
    run(f"gpu_streams.{name}", num_ranks)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("name", ["an_expert_twice", "not_finite"])
def test_odd_inputs(num_ranks: int, name: str) -> None:
    run(f"gpu_odd_inputs.{name}", num_ranks)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_two_micro_batches_on_two_streams(num_ranks: int) -> None:
    run("gpu_overlap.overlapped", num_ranks, SHARED_REPLAYS if shared_by(num_ranks) else OVERLAPPED)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_weights_given_only_at_combine(num_ranks: int) -> None:
    run("gpu_wires.late_weights", num_ranks)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("wire", ["log10", "fp8"])
def test_low_precision_combine(num_ranks: int, wire: str) -> None:
    run("gpu_wires.low_precision", num_ranks, wire)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("name", ["widths", "many_tokens", "odd_rows", "refused"])
def test_a_combine_that_adds_and_norms(num_ranks: int, name: str) -> None:
    run(f"gpu_normed.{name}", num_ranks)


@pytest.mark.parametrize("num_ranks", GROUPS)
@pytest.mark.parametrize("name", ["without_one", "failed"])
def test_a_combine_that_norms_without_a_peer(num_ranks: int, name: str) -> None:
    run(f"gpu_normed.{name}", num_ranks)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_combine_that_norms_beside_two_kernels(num_ranks: int) -> None:
    run("gpu_normed_graph.beside_add_rms_norm", num_ranks)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_combine_that_norms_in_a_graph(num_ranks: int) -> None:
    run("gpu_normed_graph.replays", num_ranks, SHARED_REPLAYS if shared_by(num_ranks) else OVERLAPPED)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_hook_not_called_is_reported(num_ranks: int) -> None:
    run("gpu_faults.hook_not_called", num_ranks)


@pytest.mark.parametrize("num_ranks", (1, 2))
def test_close_has_a_deadline(num_ranks: int) -> None:
    run("gpu_faults.closed_beside_work", num_ranks)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_handles_of_elsewhere_are_refused(num_ranks: int) -> None:
    run("gpu_faults.stale_handles", num_ranks)


@pytest.mark.parametrize("num_ranks", GROUPS)
def test_a_rank_that_does_not_come(num_ranks: int) -> None:
    run("gpu_faults.failures", num_ranks)


@pytest.mark.parametrize("num_ranks", GROUPS)
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_rank_that_is_masked(num_ranks: int, by_hand: bool) -> None:
    run("gpu_faults.masking", num_ranks, by_hand)


@pytest.mark.parametrize("num_ranks", GROUPS)
def test_a_rank_is_masked_in_the_middle_of_operations(num_ranks: int) -> None:
    run("gpu_faults.masked_in_the_middle", num_ranks)


@pytest.mark.parametrize("num_ranks", GROUPS)
@pytest.mark.parametrize("fused", [False, True])
def test_rows_are_not_visible_before_the_delay(num_ranks: int, fused: bool) -> None:
    if shared_by(num_ranks):
        pytest.skip("clocks cannot be compared closely by ranks that take turns on a GPU")
    by_rank = run("gpu_delay.not_before", num_ranks, fused)
    for rank, ahead in enumerate(by_rank):  # of the clocks of two GPUs, as each of them measures it
        assert all(abs(ns + by_rank[peer][rank]) < LOOSE_NS for peer, ns in enumerate(ahead)), by_rank


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("fused", [False, True])
def test_a_delay_changes_no_result(num_ranks: int, fused: bool) -> None:
    run("gpu_delay.same_results", num_ranks, fused)


@pytest.mark.parametrize("num_ranks", GROUPS)
@pytest.mark.parametrize("name", ["captured", "without_one", "aborted", "refused"])
def test_an_injected_delay(num_ranks: int, name: str) -> None:
    run(f"gpu_delay.{name}", num_ranks)


def test_two_micro_batches_with_a_delay() -> None:
    run("gpu_overlap.overlapped", 2, 50, 0.0005)


@pytest.mark.parametrize("num_ranks", GROUPS)
@pytest.mark.parametrize("op", ["dispatch", "combine"])
@pytest.mark.parametrize("fault", ["delayed", "dropped"])
def test_an_injected_fault(num_ranks: int, op: str, fault: str) -> None:
    run(f"gpu_faults.{fault}", num_ranks, op)


@pytest.mark.parametrize("num_ranks", GROUPS)
@pytest.mark.parametrize("on_timeout", ["raise", "mask"])
@pytest.mark.parametrize("death", DEATHS)
def test_a_killed_rank_is_reported_and_left_behind(num_ranks: int, on_timeout: str, death: str) -> None:
    check_killed(program("gpu_deaths.rank_1_dies"), num_ranks, death, on_timeout)


@pytest.mark.parametrize("num_ranks", GROUPS)
@pytest.mark.parametrize("captured", [False, True])
def test_a_killed_rank_is_replaced(num_ranks: int, captured: bool) -> None:
    """At the same addresses: graphs that were captured before the loss are replayed after it."""
    check_replaced(program("gpu_replaced.rank_of"), num_ranks, num_ranks, captured)


@pytest.mark.parametrize("num_ranks", GROUPS)
@pytest.mark.parametrize("captured", [False, True])
def test_a_rank_comes_later_and_leaves(num_ranks: int, captured: bool) -> None:
    """Graphs that were captured without it are replayed with it."""
    check_grown(program("gpu_replaced.grown_rank_of"), num_ranks, num_ranks, captured)


@pytest.mark.parametrize("num_gpus", GROUPS)
def test_several_gpus_in_one_process_a_thread_each(num_gpus: int) -> None:
    (found,) = run("gpu_local.threads", 1, num_gpus)
    failed = [f"{name}: {text}" for name, text in found.items() if text]
    assert found and not failed, "\n".join(failed)


@pytest.mark.parametrize("num_gpus", GROUPS)
def test_several_gpus_in_one_process_one_thread(num_gpus: int) -> None:
    run("gpu_local.one_thread", 1, num_gpus)


@pytest.mark.parametrize("num_gpus", GROUPS)
def test_several_gpus_in_one_process_of_which_one_is_missing(num_gpus: int) -> None:
    run("gpu_local.a_gpu_that_is_not_there", 1, num_gpus)
