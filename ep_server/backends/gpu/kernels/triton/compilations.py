"""Counts the kernels that Triton makes ready in this process; a step that has to wait for one is told of.

To compile one takes a second or more, to load one that was compiled before some milliseconds.
"""

from __future__ import annotations

import logging
from typing import Any

from triton import knobs

log = logging.getLogger(__name__)


class Compilations:
    """Takes Triton's hook, which is one for the process: the last one made counts. Called in launches.

    count: kernels so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._expected = True
        knobs.runtime.jit_post_compile_hook = self._compiled

    def expect_none(self) -> None:
        """From now on each one is a warning."""
        self._expected = False

    def _compiled(self, *, repr: str, **_: Any) -> None:
        self.count += 1
        if not self._expected:
            log.warning("a step waited for a kernel that was not compiled at start: %s", repr)
