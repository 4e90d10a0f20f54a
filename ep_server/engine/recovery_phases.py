"""Times the phases of a recovery: one log line and one observer event each.

Runs in one event loop. Units: seconds of the engine's clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from ep_server.engine.observer import EngineObserver, RecoveryPhase

log = logging.getLogger(__name__)


class RecoveryPhases:
    """The phases of the newest recovery."""

    def __init__(self, observer: EngineObserver, clock: Callable[[], float]) -> None:
        self._observer = observer
        self._clock = clock
        self._lost_at = self._served_at = 0.0
        self._continuing: set[int] = set()  # numbers of the requests without a token since
        self._no_token = False

    @property
    def continuing(self) -> bool:
        """Requests of the newest loss have no token since."""
        return bool(self._continuing)

    def lost(self, seconds: float | None) -> None:
        """A rank was lost. seconds: since the first sign of it; None = ranks regroup, and none is lost."""
        self._lost_at = self._clock()
        self._continuing.clear()
        if seconds is not None:
            self._end(RecoveryPhase.DETECT, seconds)

    def served(self, load_seconds: float) -> None:
        """The ranks serve again. load_seconds: of the slowest new process."""
        self._served_at = self._clock()
        self._end(RecoveryPhase.LOAD, load_seconds)
        self._end(RecoveryPhase.REGROUP, self._served_at - self._lost_at)

    def resumed(self, numbers: Iterable[int]) -> None:
        """Requests with tokens that the ranks were given to continue."""
        self._continuing = set(numbers)
        self._no_token = True

    def token(self, number: int) -> None:
        """A request has a token, the first since the loss."""
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

    def _end(self, phase: RecoveryPhase, seconds: float) -> None:
        log.info("recovery: %s took %.3f s", phase, seconds)
        self._observer.on_recovery_phase(phase, seconds)
