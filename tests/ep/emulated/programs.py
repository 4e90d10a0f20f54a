"""Programs of ranks on GPUs, run where the emulation stands in for the GPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ep_server.ep.native import NativeExchange
from tests.ep import emulated
from tests.harness.ranks import Peer


def on_emulation(group: dist.ProcessGroup, path: Path, name: str, *args: Any) -> Any:
    """`module.function` of tests.ep, in this rank of a group. path: of the emulation's module."""
    emulated.install(path)
    module, _, function = name.rpartition(".")
    with emulated.OnCpu():
        return getattr(importlib.import_module(f"tests.ep.{module}"), function)(group, *args)


def with_late_blocks(group: dist.ProcessGroup, path: Path, microseconds: int, name: str, *args: Any) -> Any:
    """The same where blocks begin at different times."""
    emulated.late_blocks(path, microseconds)
    return on_emulation(group, path, name, *args)


def one_dies(control: NativeExchange, path: Path, death: str, on_timeout: str, peer: Peer) -> Any:
    """gpu_deaths.rank_1_dies."""
    emulated.install(path)
    with emulated.OnCpu():
        deaths = importlib.import_module("tests.ep.gpu_deaths")
        return deaths.rank_1_dies(control, death, on_timeout, peer)
