"""Joins the scheduler's view of hand-offs with the threads that carry them out. Used in the rank's loop."""

from __future__ import annotations

from collections.abc import Callable

from ep_server.backends.kv_rows import KvRows
from ep_server.config import Config
from ep_server.errors import StartupError
from ep_server.ranks.exchanges import fabric_options
from ep_server.ranks.group import local_ranks
from ep_server.ranks.handoff.exporter import KvExporter
from ep_server.ranks.handoff.importer import KvImporter
from ep_server.ranks.handoff.lanes import Lanes
from ep_server.scheduler.handoffs import Handoffs

LOOK_SECONDS = 0.5  # of a parked rank that holds blocks


class HandoffDesk:
    """Hand-offs of one rank."""

    def __init__(
        self, handoffs: Handoffs, exporter: KvExporter | None = None, importer: KvImporter | None = None
    ) -> None:
        """None: this server does not send, or does not fetch."""
        self._handoffs, self._exporter, self._importer = handoffs, exporter, importer

    @classmethod
    def open(cls, server: Config, rows: KvRows, rank: int, handoffs: Handoffs) -> HandoffDesk:
        """As configured. Raises: StartupError if it cannot listen, or has no network; ConfigError."""
        config, exporter, importer, lanes = server.handoff, None, None, None
        if config.role != "none":
            lanes = _lanes(server, rank)
        if config.sends:
            port = config.port + rank if config.port else 0
            try:
                exporter = KvExporter(rows, config, port, lanes, beside=server.cluster.nodes > 1)
            except OSError as error:
                where = f"handoff.host = {config.host!r}, {f'port {port}' if port else 'any port'}"
                why = str(error.strerror or error).partition(" (while")[0]
                raise StartupError(f"{where}: must be an address of this host, and free ({why})") from error
        if config.fetches:
            importer = KvImporter(rows, config.timeout_seconds, config.silence_seconds, lanes)
        return cls(handoffs, exporter, importer)

    @property
    def address(self) -> tuple[str, str]:
        """(host:port, name of the local socket) where other servers fetch; empty if they cannot."""
        return ("", "") if self._exporter is None else (self._exporter.address, self._exporter.local)

    def rest(self, look: float | None = None) -> float | None:
        """The rank parks. look: how often it wakes in any case; None: not at all.

        Returns: how often it must wake, and call free_held().
        """
        if self._exporter is not None:
            self._exporter.rest()
            if look is None and self._exporter.shows:
                return LOOK_SECONDS
        return look

    def wait(self, seconds: float) -> None:
        """Until a fetch has ended, no longer than this. Returns at once if nothing is fetched."""
        if self._importer is not None and self._importer.runs:
            self._importer.wait(seconds)

    def free_held(self) -> bool:
        """Frees blocks that were fetched, or held for too long. Returns: whether there were any."""
        if self._exporter is None:
            return False
        over = self._exporter.finished()
        for number, why in over:
            self._handoffs.end(number, why)
        self._exporter.show(self._handoffs.exports())  # an order may have freed others
        return bool(over)

    def before_plan(self) -> list[int]:
        """As free_held(). Returns: tickets of the fetches that have ended."""
        self.free_held()
        ended = [] if self._importer is None else self._importer.ended()
        for ticket, tokens in ended:
            self._handoffs.arrived(ticket, tokens)
        return [ticket for ticket, _ in ended]

    def after_plan(self, start_copies: Callable[[], None]) -> None:
        """Before the step: nothing reads or writes blocks that got other owners, and new fetches begin.

        start_copies: from and to host memory. They precede fetches, which may fill blocks that are saved.
        """
        if self._exporter is not None:
            self._exporter.show(self._handoffs.exports(), step=True)
        dropped, fetches = self._handoffs.take()
        if self._importer is not None:
            self._importer.drop(dropped)
        start_copies()
        if self._importer is not None:
            self._importer.start(fetches)

    def counters(self) -> dict[str, int]:
        """Cumulative, under the names of RankStatistics.counters."""
        ends = [end for end in (self._exporter, self._importer) if end is not None]
        found = {name: value for end in ends for name, value in end.counters().items()}
        return found | {f"handoff_holds/{why}": count for why, count in self._handoffs.ends.items()}


def _lanes(server: Config, rank: int) -> Lanes | None:
    """None: TCP between hosts. Raises: as HandoffDesk.open()."""
    if server.handoff.transport != "libfabric":
        return None
    local = local_ranks(server)
    return Lanes(fabric_options(server.fabric, rank - local.start, len(local)))
