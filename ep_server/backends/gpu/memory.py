"""Checks whether a GPU has room: for the weights before they are read, then for the KV cache.

Units: bytes, KV blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ep_server.errors import StartupError

KV_SHARE = 0.8  # of the memory left by weights and exchange; the rest is for activations and graphs


@dataclass(frozen=True, slots=True)
class Room:
    """Free memory of a GPU at one moment. name: for errors."""

    name: str
    free: int
    total: int

    @staticmethod
    def on(device: torch.device) -> Room:
        """The free memory of a GPU now."""
        return Room(str(device), *torch.cuda.mem_get_info(device))

    def check_weights(self, needed: int, exchange: int = 0) -> None:
        """Checks weights before they are read, beside an exchange that is not open yet.

        Raises: StartupError with the numbers if they do not fit.
        """
        if needed + exchange > self.free:
            beside = f" and {_gib(exchange)} of exchange" if exchange else ""
            raise StartupError(f"the model does not fit: {_gib(needed)} of weights{beside}, {self._left()}")

    def kv_blocks(
        self, block: int, asked: int, useful: int, weights: int, step: int = 0, copies: int = 0
    ) -> int:
        """The number of KV blocks in the cache. What weights and exchange hold is not free any more.

        Args:
            block: bytes of one. asked: configured number; 0 = as many as fit, at most `useful`.
            weights: bytes that are on the GPU already. step: bytes that steps need beside the rest.
            copies: of them for copies of blocks, see chunk_copies.py, beside `step`.
        Raises: StartupError with the numbers if these, or a single one, do not fit.
        """
        room = max(0, self.free - step - copies)
        blocks = asked or min(int(room * KV_SHARE / block), useful)
        if blocks and blocks * block <= room:
            return blocks
        wanted = (
            f"scheduler.kv_blocks = {asked} of {block} bytes need {_gib(asked * block)}: "
            f"must be at most {room // block}, or 0"
        )
        steps = f", of which a step with many rows takes {_gib(step)} (exchange.mode)" if step else ""
        if copies:
            steps += f", of which copies of blocks for prompts take {_gib(copies)} (model.attention = auto)"
        raise StartupError(
            f"the model does not fit: with {_gib(weights)} of weights {self._left()}{steps}, "
            + (wanted if asked else f"a KV block takes {block} bytes")
        )

    def no_steps(self, sizes: str) -> StartupError:
        """The error if the memory of steps does not fit. sizes: the options it depends on, field = value."""
        return StartupError(f"no room for steps: {self._left()}, beside weights and {sizes}: must be less")

    def _left(self) -> str:
        return f"{_gib(self.free)} of {_gib(self.total)} are free on {self.name}"


@contextmanager
def room_for_steps(device: torch.device, sizes: str) -> Iterator[None]:
    """A context for allocations of steps. Raises: StartupError with the numbers if they do not fit."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise Room.on(device).no_steps(sizes) from error


def _gib(number: int) -> str:
    return f"{number / 2**30:.2f} GiB"
