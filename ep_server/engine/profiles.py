"""Profiles of all ranks: one at a time, in a folder that the operator named, and for a limited time.

Used in one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from ep_server.engine.rank_orders import RankOrders
from ep_server.errors import EpServerError, InvalidArgument, SwitchedOff, WrongState
from ep_server.orders import StartProfile, StopProfile

log = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 60.0  # for ranks to begin, and to write their files


@dataclass(frozen=True, slots=True)
class ProfileLimits:
    """directory: "" refuses profiles. seconds, steps: longest profile."""

    directory: str = ""
    seconds: float = 30.0
    steps: int = 50


class Profiles:
    """Starts and stops the profilers of all ranks."""

    def __init__(
        self, orders: RankOrders, limits: ProfileLimits, now: Callable[[], datetime] | None = None
    ) -> None:
        self._orders, self._limits = orders, limits
        self._now = now or (lambda: datetime.now(UTC))
        self._numbers = itertools.count(1)
        self._name = ""  # of the profile that runs, starts or stops
        self._busy = False  # it starts or stops
        self._timer: asyncio.TimerHandle | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def start(self, steps: int | None = None) -> str:
        """Has every rank record `steps` steps, by default and at most profile.max_steps.

        Returns: the name that its files begin with.
        Raises: SwitchedOff without profile.directory; WrongState while another runs; InvalidArgument; as
            RankOrders.give(). Nothing runs then.
        """
        if not self._limits.directory:
            raise SwitchedOff("profiles are off at this server (profile.directory is empty)")
        wanted = self._limits.steps if steps is None else steps
        if not 1 <= wanted <= self._limits.steps:
            raise InvalidArgument("num_steps", wanted, f"1 to profile.max_steps = {self._limits.steps}")
        if self._name:
            raise WrongState(f"profile {self._name} is running: stop it first, or wait until it ends")
        name = self._name = f"{self._now():%Y%m%dT%H%M%SZ}-{next(self._numbers)}"
        self._busy = True
        try:
            await self._orders.give(StartProfile(name, wanted), ANSWER_SECONDS, "starting a profile")
        except BaseException:
            self._name = ""
            with suppress(EpServerError):  # on the ranks that have begun
                await self._orders.give(StopProfile(), ANSWER_SECONDS, "stopping a profile")
            raise
        finally:
            self._busy = False
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._limits.seconds, self._time_is_over, name)
        log.info("profile %s: %d steps, at most %g s", name, wanted, self._limits.seconds)
        return name

    async def stop(self) -> Sequence[str]:
        """Ends the profile. Returns: the files of all ranks, each on its rank's host.

        Raises: WrongState if none runs; as RankOrders.give().
        """
        if not self._name or self._busy:
            raise WrongState("no profile is running")
        self._busy = True
        if self._timer is not None:
            self._timer.cancel()
        try:
            answers = await self._orders.give(StopProfile(), ANSWER_SECONDS, "stopping a profile")
        finally:
            self._busy, self._name = False, ""
        return [file for done in answers for file in done.files]

    def end(self) -> None:
        """The ranks end, and the profile that runs with them."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._busy:
            self._name = ""

    def _time_is_over(self, name: str) -> None:
        if self._name == name and not self._busy:
            self._stopping = asyncio.get_running_loop().create_task(self._stop_late(name))

    async def _stop_late(self, name: str) -> None:
        try:
            files = await self.stop()
        except EpServerError as error:
            log.warning("profile %s did not end: %s", name, error)
        else:
            log.info("profile %s ended after %g s: %s", name, self._limits.seconds, ", ".join(files))
