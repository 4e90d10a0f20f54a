"""[7] Work on a second stream of a device, beside what the current stream is given meanwhile.

In a captured step it is a branch of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
Hook = Callable[[], T]  # called once, on the stream that the work was started from


class SideStream:
    """A second stream; its branches follow one another.

    Args:
        priority: of its kernels' blocks, as CUDA has it: -1 = they go before those of streams with 0.
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]

    def fork(self) -> Fork:
        """A branch behind all that the current stream was given by now."""
        return Fork(self._stream)


class Fork:
    """A branch that has begun.

    Memory that one stream frees is never written by the other too early: what the work allocates is reused by
    a later branch, which is behind all readers, as between fork() and run() the current stream is given none
    of them; what it reads lives until the hook is gone. A hook that is never called, as its step failed,
    leaves a branch whose results nobody reads.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._begin = stream, torch.cuda.current_stream().record_event()

    def run(self, work: Callable[[], T]) -> Hook[T]:
        """Enqueues work() behind the fork, once for each; the current stream waits for it in the hook.

        The kernel behind the hook has two to wait for, one of the other stream: its own wait ends behind
        both, however early it is set up (triton/early.py).
        """
        self._stream.wait_event(self._begin)
        with torch.cuda.stream(self._stream):
            result = work()
        ended = self._stream.record_event()

        def hook(read: object = work) -> T:  # `read` holds what the work reads
            torch.cuda.current_stream().wait_event(ended)
            return result

        return hook
