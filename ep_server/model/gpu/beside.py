"""[8] Work on a second stream of a step, beside what its own stream is given: what experts of all tokens do.

In a captured step it is a second branch of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ep_server.model.gpu.rows import Hook

T = TypeVar("T")
MOST_ROWS = 256  # beyond, the products fill the device: there is nothing to gain beside them


class Beside:
    """The second stream of a device. One step at a time uses it, one branch at a time."""

    def __init__(self, device: torch.device) -> None:
        # Of high priority: the experts' blocks, which stay, would leave no multiprocessor to what is short.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def takes(self, x: torch.Tensor) -> bool:
        """Whether to work beside for rows x: [T, H]."""
        return 0 < len(x) <= MOST_ROWS

    def fork(self) -> Fork:
        """A branch behind all that the current stream was given by now."""
        return Fork(self._stream)


class Fork:
    """A branch that has begun.

    What is given to run() waits for what came before the fork and for nothing else, so it ends by itself.
    Kernels of the other stream may find multiprocessors taken when they begin: some whose blocks wait for
    each other (csrc/experts) or for peers (csrc/cuda) then begin in part, and are only late. Nothing of the
    branch may wait for them.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._begin = stream, torch.cuda.current_stream().record_event()

    def run(self, work: Callable[[], T]) -> Hook[T]:
        """Enqueues work(), once for each branch; the current stream waits for it in the hook.

        Best called behind what the current stream is given meanwhile: in a captured step the first kernel
        enqueued behind the fork goes on in the queue of the one before it, where it may begin early
        (triton/early.py). The kernel behind the hook has two to wait for, one of the other stream: its own
        wait ends behind both, however early it is set up.

        Memory that one stream frees is never written by the other too early: what the work allocates is
        reused by the next branch, which is behind all readers; what it reads lives until the hook is gone.
        """
        self._stream.wait_event(self._begin)
        with torch.cuda.stream(self._stream):
            result = work()
        ended = self._stream.record_event()

        def hook(read: object = work) -> T:  # `read` holds what the work reads
            torch.cuda.current_stream().wait_event(ended)
            return result

        return hook
