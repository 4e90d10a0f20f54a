"""What benchmarks of kernels on one GPU share: graphs that are timed, lists of numbers as arguments."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

BF16 = torch.bfloat16
RATE = 4.5e12  # bytes a second that kernels can hope for of an H200's memory
REPLAYS = 30


def arguments(text: str | None, **lists: str) -> argparse.ArgumentParser:
    """A parser with options that are lists of numbers, by their defaults. text: what it is about."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in lists.items():
        parser.add_argument(f"--{name}", default=default, type=numbers)
    return parser


def numbers(text: str) -> list[int]:
    """With commas between them."""
    return [int(one) for one in text.split(",")]


def time_us(work: Callable[[], object]) -> float:
    """us of the GPU, once."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def median_us(work: Callable[[], object]) -> float:
    """us of the GPU, of REPLAYS."""
    return statistics.median(time_us(work) for _ in range(REPLAYS))


def captured(work: Callable[[int], object], sets: int, rounds: int = 1) -> torch.cuda.CUDAGraph:
    """Calls of work with the numbers of the sets in turn, some rounds of them."""
    for which in range(sets):
        work(which)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for which in range(sets):
                work(which)
    return graph


def in_graph(work: Callable[[int], object], sets: int, rounds: int = 3) -> float:
    """us per call, see captured()."""
    return median_us(captured(work, sets, rounds).replay) / (rounds * sets)
