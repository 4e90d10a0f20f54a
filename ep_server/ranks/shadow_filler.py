"""A rank's part of the host shadow: it copies what it serves into it, and locks what it may have to load."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product

from ep_server.backends.assembly import MOST_READERS, LoadParams, RankModel
from ep_server.backends.shadow import HostExperts
from ep_server.errors import EpServerError
from ep_server.models.experts import SlotMove
from ep_server.ranks.changes import NICE
from ep_server.ranks.experts import RankExperts
from ep_server.scheduler.placement import Placement

log = logging.getLogger(__name__)

BESIDE_THREADS = 4  # that copy while steps run
AT_ONCE = 4  # experts copied while slots must not change: a recovery waits for them
REST_SECONDS = 0.005  # between two pieces that are locked while steps run


class ShadowFiller:
    """The thread of start() ends once all is copied and locked. Others may call its methods at any time.

    experts: of the rank; None where they stay.
    """

    def __init__(
        self, shadow: HostExperts, model: RankModel, params: LoadParams, experts: RankExperts | None
    ) -> None:
        self._shadow, self._model, self._params, self._experts = shadow, model, params, experts
        self._stop, self._idle = threading.Event(), threading.Lock()  # held while it copies

    def fill(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Copies and locks at once. Raises: Unavailable without memory."""
        self._copy(max(1, min(self._params.threads, MOST_READERS)), len(self._served()) or 1, progress)
        self._lock(0.0)

    def start(self, *, copies: bool) -> None:
        """Does it beside steps. copies: else it only locks."""
        threading.Thread(target=self._run, args=(copies,), name="shadow", daemon=True).start()

    def stop(self) -> None:
        """Ends copying, soon: other weights will be written. Experts that are missing stay so."""
        self._stop.set()
        with self._idle:
            pass

    def _run(self, copies: bool) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # threads that it starts inherit it
        try:
            if copies:
                self._copy(min(self._params.threads, BESIDE_THREADS), AT_ONCE, lambda done, total: None)
            self._lock(REST_SECONDS)
        except EpServerError as error:
            log.warning("the host shadow is not complete, experts may come from the checkpoint: %s", error)
        except Exception:
            log.exception("the host shadow is not complete, experts may come from the checkpoint")

    def _copy(self, threads: int, at_once: int, progress: Callable[[int, int], None]) -> None:
        """Raises: Unavailable."""
        began, count, over = time.monotonic(), 0, False
        with ThreadPoolExecutor(threads, "shadow") as pool:
            while not over:
                placement, wanted = self._placement(), self._served()
                for first in range(0, len(wanted), at_once):
                    count += self._save(wanted[first : first + at_once], pool, progress)
                    if self._stop.is_set() or self._placement() is not placement:
                        break
                over = self._stop.is_set() or self._placement() is placement
        log.info("copied %d experts into the host shadow in %.2f s", count, time.monotonic() - began)

    def _save(
        self, slots: list[SlotMove], pool: ThreadPoolExecutor, progress: Callable[[int, int], None]
    ) -> int:
        """Copies what slots still hold. Returns: how many."""
        weights, version = self._model.weights, self._params.version
        with self._idle:
            if self._stop.is_set():
                return 0
            if self._experts is None:
                return self._shadow.save(weights, slots, version, pool, progress)
            with self._experts.kept(slots) as held:
                return self._shadow.save(weights, held, version, pool, progress)

    def _placement(self) -> Placement | None:
        """In force, which says what each rank copies."""
        return None if self._experts is None else self._experts.placement

    def _served(self) -> list[SlotMove]:
        """Slots of what this rank copies: each expert is copied by one rank."""
        if self._experts is None:
            return self._params.slots(self._model.spec)
        return self._experts.served_slots()

    def _lock(self, rest: float) -> None:
        """Raises: Unavailable."""
        if self._experts is None:
            return  # its slots never hold others
        began, spec = time.monotonic(), self._model.spec
        own = {(one.layer, one.expert) for one in self._params.slots(spec)}
        everything = product(range(spec.num_layers), range(spec.router.num_experts))
        self._shadow.pin([one for one in everything if one not in own], rest)
        log.info("locked the host shadow in %.2f s", time.monotonic() - began)
