"""[10] After the loss of a rank: starts the ranks again and continues the requests where they stopped.

Runs in one event loop. Units: seconds of the engine's clock.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from ep_server.config import LOSS_SECONDS
from ep_server.engine.delivery import Delivery
from ep_server.engine.observer import EngineObserver
from ep_server.engine.state import EngineSettings
from ep_server.errors import CheckpointError, ConfigError, StartupError

log = logging.getLogger(__name__)

AGAIN_SECONDS = 1.0  # before the third start in a row; twice as long before each one after it,
MOST_AGAIN_SECONDS = 30.0  # but no longer
MOST_UNREADABLE = 2  # starts in a row after which a checkpoint that cannot be read ends the server


class Recovery:
    """Starts the ranks again, as often as settings.max_losses allows. A failed start counts as a loss."""

    def __init__(
        self,
        delivery: Delivery,
        settings: EngineSettings,
        restart: Callable[[], Awaitable[None]],
        observer: EngineObserver,
        clock: Callable[[], float],
    ) -> None:
        """restart: replaces the lost ranks, or all of them. Raises: StartupError."""
        self._delivery = delivery
        self._settings = settings
        self._restart = restart
        self._observer = observer
        self._clock = clock
        self._losses: deque[float] = deque(maxlen=settings.max_losses)  # when
        self._last_loss: dict[int, float] = {}  # by rank: when
        self._running: asyncio.Task[None] | None = None
        self._failed = 0  # starts in a row
        self._lost_again = False  # the new ranks too, before they got the requests

    def begin(self, rank: int | None) -> bool:
        """A rank was lost; None: the ranks regroup in order. Returns: whether other ranks start."""
        if rank is None:
            log.info("%s; the ranks regroup", self._delivery.lost_message)
            self._run_again()
            return True
        before, self._last_loss[rank] = self._last_loss.get(rank), self._clock()
        if before is not None and self._last_loss[rank] - before < LOSS_SECONDS:
            log.error("rank %d was lost twice within %.0f s: look at the host", rank, LOSS_SECONDS)
        if not self._survives():
            return False
        log.error("%s; replacing it", self._delivery.lost_message)
        self._run_again()
        return True

    def _run_again(self) -> None:
        if self._running is not None and not self._running.done():
            self._lost_again = True
        else:
            self._running = asyncio.get_running_loop().create_task(self._run(self._clock()))

    async def stop(self) -> None:
        """Gives up. Idempotent."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait((self._running,))

    async def _run(self, since: float) -> None:
        try:
            while not await self._started():
                pass
            requests = self._delivery.resume()
        except Exception as error:
            unexpected = not isinstance(error, StartupError)
            log.error("the ranks did not start again: %s", error, exc_info=unexpected)
            self._delivery.give_up(f"the ranks did not start again: {error}")
            return
        seconds = self._clock() - since
        self._observer.on_recovered(seconds, requests)
        log.info("recovered after %.2f s: %d requests continue", seconds, requests)

    async def _started(self) -> bool:
        """Starts the ranks once. Returns: False to try again. Raises: StartupError to give up."""
        self._lost_again = False
        try:
            await self._restart()
        except ConfigError:  # the same at every start
            raise
        except StartupError as error:
            unreadable = isinstance(error, CheckpointError) and self._failed >= MOST_UNREADABLE
            if unreadable or not self._survives():
                raise
            log.warning("the ranks did not start: %s", error)
            self._failed += 1
            if self._failed > 1:  # the host may lack something for a while: processes, descriptors, storage
                await asyncio.sleep(min(AGAIN_SECONDS * 2 ** (self._failed - 2), MOST_AGAIN_SECONDS))
            return False
        self._failed = 0
        return not self._lost_again

    def _survives(self) -> bool:
        """Counts a loss. Returns: whether the ranks may start again."""
        now = self._clock()
        often = len(self._losses) == self._settings.max_losses and now - self._losses[0] < LOSS_SECONDS
        self._losses.append(now)
        return self._settings.recover and not often
