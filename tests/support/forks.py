"""Processes of tests, forked from one that has imported what they need and does nothing else.

There is one such server per test run, which the first caller starts: a list of imports for each caller would
be that of the first one for all, and every process after it would import the rest by itself.
"""

from __future__ import annotations

import multiprocessing
import pickle
from multiprocessing.context import ForkServerContext
from typing import Any

PRELOADED = [
    "hypothesis",
    "numpy",
    "pytest",
    "torch.distributed",
    "torch.testing",
    "ep_server.exchange.bootstrap",
    "tests.support.exchange.process_group",
    "tests.support.exchange.ranks",
    "tests.support.fabric.fabric_ends",
]


def by_value(value: Any) -> bytes:
    """For Connection.send_bytes, read by recv(). send() would share the memory of tensors, and a process that
    ends before they are fetched takes them along.
    """
    return pickle.dumps(value)


def context() -> ForkServerContext:
    """Whose processes begin with these imports."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOADED)
    return made
