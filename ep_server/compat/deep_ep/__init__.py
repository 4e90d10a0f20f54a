"""`import deep_ep` for code written against DeepEP's low-latency calls: its names, on CPU and CUDA tensors.

Either import this package in its place, or call `install()` once before the first `import deep_ep`, or put
the folder that holds this package into PYTHONPATH for programs that must not be touched.
"""

from __future__ import annotations

import sys

from ep_server.compat.deep_ep.buffer import Buffer, topk_idx_t
from ep_server.compat.deep_ep.events import Config, EventHandle, EventOverlap
from ep_server.errors import StartupError

NAME = "deep_ep"

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "install", "topk_idx_t"]


def install() -> None:
    """Makes `import deep_ep` find this package; without effect the second time.

    Raises: StartupError if another deep_ep has been imported already.
    """
    ours = sys.modules[__name__]
    if sys.modules.setdefault(NAME, ours) is not ours:
        raise StartupError("another deep_ep has been imported: call install() before the first import of it")
