"""Programs of ranks on GPUs, run where the emulation stands in for the GPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ep_server.exchange.host import HostExchange
from tests.support.exchange import emulated
from tests.support.exchange.killed_rank import Segment
from tests.support.exchange.ranks import Peer


def on_emulation(group: dist.ProcessGroup, path: Path, name: str, *args: Any) -> Any:
    """`module.function` of tests.support.exchange, in this rank. path: of the emulation's module."""
    emulated.install(path)
    module, _, function = name.rpartition(".")
    with emulated.OnCpu():
        return getattr(importlib.import_module(f"tests.support.exchange.{module}"), function)(group, *args)


def with_late_blocks(group: dist.ProcessGroup, path: Path, microseconds: int, name: str, *args: Any) -> Any:
    """The same where blocks begin at different times."""
    emulated.late_blocks(path, microseconds)
    return on_emulation(group, path, name, *args)


def with_multiprocessors(group: dist.ProcessGroup, path: Path, count: int, name: str, *args: Any) -> Any:
    """The same on a GPU of so many."""
    emulated.multiprocessors(path, count)
    return on_emulation(group, path, name, *args)


def with_clocks_apart(group: dist.ProcessGroup, path: Path, ns: int, name: str, *args: Any) -> Any:
    """The same where the clock of each rank's GPU is so far ahead of that of the rank before."""
    emulated.clock_ahead(path, group.rank() * ns)
    return on_emulation(group, path, name, *args)


def one_dies(control: HostExchange, path: Path, death: str, on_timeout: str, peer: Peer) -> Any:
    """gpu_deaths.rank_1_dies."""
    emulated.install(path)
    with emulated.OnCpu():
        deaths = importlib.import_module("tests.support.exchange.gpu_deaths")
        return deaths.rank_1_dies(control, death, on_timeout, peer)


def one_is_replaced(segment: Segment, path: Path, num_ranks: int, peer: Peer) -> Any:
    """gpu_replaced.rank_of, without graphs."""
    emulated.install(path)
    with emulated.OnCpu():
        replaced = importlib.import_module("tests.support.exchange.gpu_replaced")
        return replaced.rank_of(segment, num_ranks, False, peer)


def one_comes_and_leaves(segment: Segment, path: Path, num_ranks: int, peer: Peer) -> Any:
    """gpu_replaced.grown_rank_of, without graphs."""
    emulated.install(path)
    with emulated.OnCpu():
        replaced = importlib.import_module("tests.support.exchange.gpu_replaced")
        return replaced.grown_rank_of(segment, num_ranks, False, peer)
