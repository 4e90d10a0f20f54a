"""Runs a function in several real processes that share a gloo process group.

Owns spawning, the rendezvous file, the collection of results and a hard deadline. Units: seconds.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.support import forks


def run_group(
    fn: Callable[..., Any],
    num_ranks: int,
    *,
    args: tuple[Any, ...] = (),
    timeout: float = 120.0,
    killed: Collection[int] = (),
) -> list[Any]:
    """Runs fn(group, *args) on every rank and returns the values in rank order.

    Args:
        fn: a module-level function; its value must pickle.
        killed: ranks that must die instead of answering; their value is None.
    Raises: AssertionError with every traceback, if a rank raised, died or ran past `timeout`.
    """
    context = forks.context()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_main, args=(fn, rank, num_ranks, f"{folder}/store", theirs, args), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, time.monotonic() + timeout, killed)
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join(5)


def _collect(pipes: list[Connection], deadline: float, killed: Collection[int]) -> list[Any]:
    values, problems = [], []
    for rank, pipe in enumerate(pipes):
        try:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                problems.append(f"rank {rank} passed the deadline of the test")
                continue
            failed, value = pipe.recv()
            if rank in killed and not failed:
                failed, value = True, "lived, and was to die"
        except (EOFError, ConnectionResetError):
            failed, value = rank not in killed, None if rank in killed else "died without an answer"
        if failed:
            problems.append(f"rank {rank}: {value}")
        values.append(value)
    assert not problems, "\n".join(problems)
    return values


def _main(
    fn: Callable[..., Any], rank: int, num_ranks: int, store: str, pipe: Connection, args: tuple[Any, ...]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=30),
        )
        pipe.send_bytes(forks.by_value((False, fn(dist.group.WORLD, *args))))
        dist.barrier()  # nobody leaves while a peer still talks
        dist.destroy_process_group()
    except BaseException:
        with contextlib.suppress(BrokenPipeError):
            pipe.send((True, traceback.format_exc()))
