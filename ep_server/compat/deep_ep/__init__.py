"""`import deep_ep` for code written against DeepEP's Buffer, on CPU and CUDA tensors.

Three ways to use it: import this package instead, call `install()` once before the first `import deep_ep`, or
put the folder that holds this package into PYTHONPATH to run unmodified programs.
"""

from __future__ import annotations

import sys

from ep_server.compat.deep_ep.bootstrap import Network
from ep_server.compat.deep_ep.buffer import Buffer, topk_idx_t
from ep_server.compat.deep_ep.events import Config, EventHandle, EventOverlap
from ep_server.errors import StartupError

NAME = "deep_ep"

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "Network", "install", "topk_idx_t"]


def install() -> None:
    """Makes `import deep_ep` find this package. A second call has no effect.

    Raises: StartupError if another deep_ep is already imported.
    """
    ours = sys.modules[__name__]
    if sys.modules.setdefault(NAME, ours) is not ours:
        raise StartupError("another deep_ep is already imported: call install() before importing it")
