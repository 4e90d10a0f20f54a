"""Scales a running server at random within bounds, and gives it new weights: the ones that it has."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ep_server.client import AsyncClient
from ep_server.errors import ConfigError, Unavailable

AGAIN_SECONDS = 0.2
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a server allows.

    fewest, most: ranks that a scale leaves. first: that serve at the beginning; 0 = no scale is wanted.
    path: of the checkpoint in force.
    """

    fewest: int = 0
    most: int = 0
    first: int = 0
    path: str = ""


@dataclass(frozen=True, slots=True)
class Changed:
    """A change. began, ended: time.monotonic(). pause: seconds for which a rank ran no step, as reported."""

    what: str
    began: float
    ended: float
    pause: float


async def bounds_of(client: AsyncClient, ranks: tuple[int, int], *, scales: bool, updates: bool) -> Bounds:
    """Those of a server. ranks: fewest and most as asked for; 0 = as the server is configured.

    Raises: ConfigError for a server that takes no such change; EpServerError.
    """
    config = (await client.diagnostics()).config
    start, most = (json.loads(config[f"parallel.{name}"]) for name in ("ranks", "max_ranks"))
    fewest, highest = ranks[0] or start, ranks[1] or max(start, most)
    if scales and not 1 <= fewest < highest <= max(start, most):
        allowed = f"two numbers, the smaller one first, at most {max(start, most)} (parallel.max_ranks)"
        raise ConfigError("--scale-ranks", (fewest, highest), allowed)
    if updates and not json.loads(config["model.updates"]):
        raise ConfigError(
            "model.updates", "", "a folder with the checkpoint, on the server, for --kind update"
        )
    info = await client.server_info()
    return Bounds(fewest, highest, len(info.live_ranks) if scales else 0, info.weights_path)


class Changes:
    """done: in order."""

    def __init__(self, client: AsyncClient, bounds: Bounds, seconds: float, draw: random.Random) -> None:
        """seconds: that a change may wait for ranks that return, or for another one."""
        self.done: list[Changed] = []
        self._client, self._bounds, self._seconds, self._draw = client, bounds, seconds, draw

    async def scale(self) -> None:
        """Adds ranks, drains some, or drains one and holds it out. Raises: EpServerError."""
        live = list((await self._client.server_info()).live_ranks)
        fewest, most = self._bounds.fewest, self._bounds.most
        if len(live) > fewest and self._draw.random() < 0.5:
            held = self._draw.choice(live)
            await self._change(f"hold out {held}", lambda: self._client.scale(0, [held]))
        else:
            count = self._draw.choice([count for count in range(fewest, most + 1) if count != len(live)])
            await self._change(f"scale to {count}", lambda: self._client.scale(count))

    async def update(self) -> None:
        """New weights, which are those in force. Raises: EpServerError."""
        await self._change("update", lambda: self._client.update_weights(self._bounds.path))

    async def restore(self) -> None:
        """As many ranks as before. Raises: EpServerError."""
        if self._bounds.first:
            await self._until_taken(lambda: self._client.scale(self._bounds.first))

    async def _change(self, what: str, call: Callable[[], Awaitable[Any]]) -> None:
        began = time.monotonic()
        answer = await self._until_taken(call)
        self.done.append(Changed(what, began, time.monotonic(), answer.pause_seconds))

    async def _until_taken(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeats a call that is refused because a rank has been lost or returns."""
        deadline = time.monotonic() + self._seconds
        while True:
            try:
                return await call()
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(AGAIN_SECONDS)
