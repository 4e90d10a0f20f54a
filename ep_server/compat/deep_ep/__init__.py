"""`import deep_ep` for code written against DeepEP: its names, on CPU tensors and shared memory.

Either import this package in its place, or call `install()` once before the first `import deep_ep`.
"""

from __future__ import annotations

import sys

from ep_server.ep.buffer import Buffer, topk_idx_t
from ep_server.ep.events import Config, EventOverlap
from ep_server.errors import StartupError

NAME = "deep_ep"

__all__ = ["Buffer", "Config", "EventOverlap", "install", "topk_idx_t"]


def install() -> None:
    """Makes `import deep_ep` find this package; without effect the second time.

    Raises: StartupError if another deep_ep has been imported already.
    """
    ours = sys.modules[__name__]
    if sys.modules.setdefault(NAME, ours) is not ours:
        raise StartupError("another deep_ep has been imported: call install() before the first import of it")
