"""[7] Work on a second stream, concurrent with the current one. In a captured step it is a graph branch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
Hook = Callable[[], T]  # called once, on the stream that the work was started from


class SideStream:
    """A second stream, which runs its branches one after another.

    Args:
        priority: CUDA's stream priority; blocks of -1 are scheduled before those of 0.
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]

    def fork(self) -> Fork:
        """Begins a branch after all work that the current stream has so far."""
        return Fork(self._stream)


class Fork:
    """A branch that has begun.

    Neither stream overwrites memory that the other still reads. A later branch reuses what this branch's work
    allocates, and it starts behind all readers: the current stream gets no reader between fork() and run().
    What the work reads lives until the hook is gone. If a step fails, its hook is never called, and nobody
    reads the results of the branch.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._begin = stream, torch.cuda.current_stream().record_event()

    def run(self, work: Callable[[], T]) -> Hook[T]:
        """Enqueues work() after the fork, once per fork. The hook makes the current stream wait for it.

        The kernel after the hook waits for both streams, however early it is set up (triton/launch.py).
        """
        self._stream.wait_event(self._begin)
        with torch.cuda.stream(self._stream):
            result = work()
        ended = self._stream.record_event()

        def hook(read: object = work) -> T:  # `read` holds what the work reads
            torch.cuda.current_stream().wait_event(ended)
            return result

        return hook
