"""[9] What sampling needs of the requests that have a grammar."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np

# A step waits so long for masks; then it draws the other rows. The library bounds a mask to less.
PATIENCE_SECONDS = 0.02


class Masks(Protocol):
    """Which tokens may come next, by request. Requests without a grammar are not in it."""

    def __len__(self) -> int:
        """Requests with a grammar."""
        ...

    def __contains__(self, number: int) -> bool:
        """Whether a request has a grammar."""
        ...

    def wait(self, numbers: Collection[int], seconds: float) -> None:
        """Waits until all of them are ready(), at most so long."""
        ...

    def ready(self, number: int) -> bool:
        """Whether the next token of a request may be drawn."""
        ...

    def mask(self, number: int) -> np.ndarray | None:
        """[ceil(V / 32)] int32 of a request that is ready(): bit t % 32 of word t / 32 allows token t.

        allowed_token_ids and min_new_tokens are in it. None = everything: the request has ended, and
        what it draws is dropped.
        """
        ...


class NoMasks:
    """Of a rank whose requests have no grammar."""

    def __len__(self) -> int:
        return 0

    def __contains__(self, number: int) -> bool:
        return False

    def wait(self, numbers: Collection[int], seconds: float) -> None:
        """Nothing to wait for."""

    def ready(self, number: int) -> bool:
        """Always."""
        return True

    def mask(self, number: int) -> np.ndarray | None:
        """Everything."""
        return None
