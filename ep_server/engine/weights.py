"""[10] New weights while requests run: every rank prepares them, then all switch before the same step.

The frontend decides once every rank has prepared. Until then nothing has changed, and an error leaves it so.
Then the new weights are in force: ranks that start again load them. Used in one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ep_server.engine.rank_orders import RankOrders
from ep_server.errors import DeadlineExceeded, EpServerError, Unavailable, WrongState
from ep_server.orders import DropChange, PrepareWeights, SwitchChange

log = logging.getLogger(__name__)

PREPARE_SECONDS, SWITCH_SECONDS, DROP_SECONDS = 1800.0, 60.0, 10.0


@dataclass(frozen=True, slots=True)
class WeightsUpdated:
    """An update. nbytes: copied by the rank with the most. pause: longest of a rank, seconds.

    bound: what copying alone takes at the rate measured before, seconds.
    """

    version: int
    nbytes: int
    pause: float
    bound: float


class Weights:
    """The weights in force: a version, counted from 0, and the path of their checkpoint.

    switching: some ranks may still compute with those before.
    """

    def __init__(
        self, orders: RankOrders, path: str, adopt: Callable[[str, int, str], None], most_pause: float
    ) -> None:
        """adopt: gets path, version and files that ranks load when they start again. most_pause: seconds."""
        self.version, self.path, self.switching = 0, path, False
        self._orders, self._adopt, self._most_pause = orders, adopt, most_pause
        self._path = ""  # of the update that runs
        self._running: asyncio.Task[WeightsUpdated] | None = None

    async def update(self, path: str, check: Callable[[str], str]) -> WeightsUpdated:
        """Switches all ranks to the weights of another checkpoint. It goes on if the caller leaves.

        check: see Engine.update_weights().
        Raises: what `check` raises; WrongState while another update runs; Unavailable if a rank refuses or is
            lost; DeadlineExceeded. The weights stay then, unless the error says that the new ones are in
            force.
        """
        if self._running is not None and not self._running.done():
            raise WrongState(f"an update to {self._path} is running")
        self._path = path
        self._running = asyncio.get_running_loop().create_task(self._update(path, check))
        return await asyncio.shield(self._running)

    async def _update(self, path: str, check: Callable[[str], str]) -> WeightsUpdated:
        files = await asyncio.to_thread(check, path)
        async with self._orders.changing:
            return await self._switch(path, files)

    async def _switch(self, path: str, files: str) -> WeightsUpdated:
        change, version = next(self._orders.changes), self.version + 1
        order = PrepareWeights(change, version, path, files)
        try:
            prepared = await self._orders.give(order, PREPARE_SECONDS, f"reading weights from {path}")
            bound = max(done.nbytes / max(done.rate, 1.0) for done in prepared)
            if bound > self._most_pause:
                raise Unavailable(
                    f"copying the weights of {path} would stop the ranks for {bound:.1f} s: at most "
                    f"exchange.timeout_seconds = {self._most_pause:g}"
                )
            self._orders.check()
        except EpServerError as error:
            log.warning("weights stay at version %d: %s", self.version, error)
            with suppress(EpServerError):
                await self._orders.give(DropChange(change), DROP_SECONDS, "dropping the new weights")
            raise
        self.version, self.path, self.switching = version, path, True
        try:
            self._adopt(path, version, files)
            switched = await self._orders.give(SwitchChange(change), SWITCH_SECONDS, f"switching to {path}")
        except (DeadlineExceeded, Unavailable) as error:
            stands = f"{error}; weights {version} are in force, and ranks that have not switched do so later"
            log.warning("%s", stands)
            raise type(error)(stands) from error
        finally:
            self.switching = False
        done = WeightsUpdated(
            version, max(one.nbytes for one in prepared), max(one.seconds for one in switched), bound
        )
        log.info(
            "weights %d from %s: steps paused %.1f ms; copying %.3f GiB takes %.1f ms at the measured rate",
            version,
            path,
            done.pause * 1000,
            done.nbytes / 2**30,
            bound * 1000,
        )
        return done
