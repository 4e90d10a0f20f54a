"""A rank's part of the host shadow: it copies what it serves into it, and locks what it may have to load."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ep_server.backends.assembly import MOST_READERS, LoadParams, RankModel
from ep_server.backends.shadow import HostExperts
from ep_server.errors import EpServerError
from ep_server.models.experts import SlotMove
from ep_server.ranks.background import yield_cores
from ep_server.ranks.experts import RankExperts

log = logging.getLogger(__name__)

BESIDE_THREADS = 4  # that copy while steps run
AT_ONCE = 4  # experts copied while slots must not change: a recovery waits for them
REST_SECONDS = 0.005  # between two pieces that are locked while steps run
CLOSE_SECONDS = 2.0  # a rank that ends waits so long for what is being copied or locked


class ShadowFiller:
    """The thread of start() ends with stop() or close(). Others may call its methods at any time.

    experts: of the rank; None where they stay, and the thread ends once all is copied.
    """

    def __init__(
        self, shadow: HostExperts, model: RankModel, params: LoadParams, experts: RankExperts | None
    ) -> None:
        self._shadow, self._model, self._params, self._experts = shadow, model, params, experts
        self._stop, self._idle = threading.Event(), threading.Lock()  # held while it copies
        self._closed = False
        self._thread: threading.Thread | None = None

    def fill(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Copies and locks at once. Raises: Unavailable without memory."""
        self._copy(max(1, min(self._params.threads, MOST_READERS)), len(self._served()) or 1, progress)
        self._lock(0.0)

    def start(self, *, copies: bool) -> None:
        """Does it beside steps, and copies what the rank serves after each RankExperts.use().

        copies: at once. Else only what is missing after the next use().
        """
        if self._experts is not None:
            self._experts.changed.clear()
        self._thread = threading.Thread(target=self._run, args=(copies,), name="shadow", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends copying, soon: other weights will be written. Experts that are missing stay so."""
        self._end()
        with self._idle:
            pass

    def close(self) -> None:
        """The rank ends."""
        self._closed = True
        self._end()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _end(self) -> None:
        self._stop.set()
        if self._experts is not None:
            self._experts.changed.set()

    def _run(self, copies: bool) -> None:
        yield_cores()
        if copies:
            self._try(self._copy_beside)
        self._try(lambda: self._lock(REST_SECONDS))
        while self._experts is not None and not self._stop.is_set():
            self._experts.changed.wait()
            self._experts.changed.clear()
            self._try(self._copy_beside)

    def _copy_beside(self) -> None:
        self._copy(max(1, min(self._params.threads, BESIDE_THREADS)), AT_ONCE, lambda done, total: None)

    def _try(self, work: Callable[[], None]) -> None:
        """An error ends the work at hand, not the thread."""
        try:
            work()
        except EpServerError as error:
            log.warning("the host shadow is not complete, experts may come from the checkpoint: %s", error)
        except Exception:
            log.exception("the host shadow is not complete, experts may come from the checkpoint")

    def _copy(self, threads: int, at_once: int, progress: Callable[[int, int], None]) -> None:
        """Raises: Unavailable."""
        began, count, over = time.monotonic(), 0, False
        with ThreadPoolExecutor(threads, "shadow") as pool:
            while not over:
                now, wanted = self._now(), self._shadow.lacking(self._served(), self._params.version)
                for first in range(0, len(wanted), at_once):
                    count += self._save(wanted[first : first + at_once], pool, progress)
                    if self._stop.is_set() or self._now() is not now:
                        break
                over = self._stop.is_set() or self._now() is now
        if count:
            log.info("copied %d experts into the host shadow in %.2f s", count, time.monotonic() - began)

    def _save(
        self, slots: list[SlotMove], pool: ThreadPoolExecutor, progress: Callable[[int, int], None]
    ) -> int:
        """Copies what slots still hold. Returns: how many."""
        weights, version = self._model.weights, self._params.version
        with self._idle:
            if self._stop.is_set() or self._shadow.outdated(version):
                return 0
            if self._experts is None:
                return self._shadow.save(weights, slots, version, pool, progress)
            with self._experts.kept(slots) as held:
                return self._shadow.save(weights, held, version, pool, progress)

    def _now(self) -> object:
        """Another object after each use(), which says what each rank copies."""
        return None if self._experts is None else self._experts.now

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
        for layer in range(spec.num_layers):
            if self._closed:
                return
            everything = ((layer, expert) for expert in range(spec.router.num_experts))
            self._shadow.pin([one for one in everything if one not in own], rest)
        log.info("locked the host shadow in %.2f s", time.monotonic() - began)
