"""Times the phases of a recovery: one log line and one observer event each.

Runs in one event loop. Units: seconds of the engine's clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from ep_server.engine.active_request import ActiveRequest
from ep_server.engine.observer import EngineObserver, RecoveryPhase

log = logging.getLogger(__name__)


class RecoveryPhases:
    """The phases of the newest recovery. copied: tokens of it whose KV came from memory of the lost ranks."""

    def __init__(
        self, observer: EngineObserver, clock: Callable[[], float], settled: Callable[[], None]
    ) -> None:
        """settled: called once every request that a lost rank had begun has a token again, or has ended."""
        self._observer = observer
        self._clock = clock
        self._settled = settled
        self.copied = 0
        self._lost_at = self._served_at = 0.0
        self._down = False  # a rank is lost, and requests are yet to be given again
        self._given: set[int] = set()  # numbers of begun requests without a token since any loss
        self._continuing: set[int] = set()  # of these, those of the newest loss that had tokens
        self._tokens = self._cached = 0  # of what is given again; of these, found in prefix caches
        self._no_token = False

    def lost(self, seconds: float | None) -> None:
        """A rank was lost. seconds: since the first sign of it; None = ranks regroup, and none is lost."""
        self._lost_at = self._clock()
        self._down = True
        self._continuing.clear()
        if seconds is not None:
            self._end(RecoveryPhase.DETECT, seconds)

    def served(self, load_seconds: float) -> None:
        """The ranks serve again. load_seconds: of the slowest new process."""
        self._served_at = self._clock()
        self._end(RecoveryPhase.LOAD, load_seconds)
        self._end(RecoveryPhase.REGROUP, self._served_at - self._lost_at)

    def resumed(self, given: Iterable[ActiveRequest]) -> None:
        """Requests that the ranks are given again."""
        requests = list(given)
        continuing = [active for active in requests if active.output_tokens]
        begun = [active for active in requests if active.output_tokens or active.suspected]
        self._given |= {active.request.number for active in begun}
        self._continuing = {active.request.number for active in continuing}
        self._tokens = sum(len(active.request.prompt_ids) + active.output_tokens for active in begun)
        self.copied = self._cached = 0
        self._no_token = True
        self._down = False
        if not self._given:
            self._settled()

    def token(self, number: int, cached: int = 0) -> None:
        """A request has a token. cached: see TokenEvent."""
        if number in self._given:
            self._cached += cached
        if self._no_token and number in self._continuing:
            self._no_token = False
            self._end(RecoveryPhase.FIRST_TOKEN, self._clock() - self._lost_at)
        self.settled(number)

    def settled(self, number: int) -> None:
        """A request has a token or has ended."""
        if number in self._continuing:
            self._continuing.discard(number)
            if not self._continuing:
                self._end(RecoveryPhase.PREFILL, self._clock() - self._served_at)
        if number in self._given:
            self._given.discard(number)
            if not self._given and not self._down:
                text = (
                    "recovery: requests with %d tokens went on; ranks copied %d tokens from memory of the "
                    "lost ones, and found %d in their prefix caches"
                )
                log.info(text, self._tokens, self.copied, self._cached)
                self._settled()

    def _end(self, phase: RecoveryPhase, seconds: float) -> None:
        log.info("recovery: %s took %.3f s", phase, seconds)
        self._observer.on_recovery_phase(phase, seconds)
