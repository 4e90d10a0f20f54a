"""`ep-server serve`: one server in the foreground, with progress while the weights load."""

from __future__ import annotations

import logging
import sys

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ep_server import app, logs
from ep_server.commands.options import with_config
from ep_server.config import Config

NAME = "serve"
log = logging.getLogger(__name__)


@with_config
def command(config: Config) -> None:
    """Serve a Mixture-of-Experts checkpoint over gRPC.

    SIGTERM or Ctrl-C drains: requests in flight finish, new ones get UNAVAILABLE. A second one stops at once.
    """
    logs.configure(config.log)
    live = sys.stderr.isatty() and config.log.format == "text"
    display = LoadingDisplay(config.parallel.ranks, Console(stderr=True) if live else None)

    def serving(made: app.App) -> None:
        display.close()
        if made.metrics_url:
            log.info("metrics at %s", made.metrics_url)

    try:
        code = app.run(config, display.update, serving)
    finally:
        display.close()
    raise typer.Exit(code)


class LoadingDisplay:
    """A bar per rank on `console`, or without one a log line per rank and stage. `close` is idempotent."""

    def __init__(self, ranks: int, console: Console | None) -> None:
        self._said: set[tuple[int, str]] = set()
        self._progress: Progress | None = None
        if console is not None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
            self._tasks = [self._progress.add_task(f"rank {rank}", total=None) for rank in range(ranks)]
            self._progress.start()

    def update(self, rank: int, stage: str, done: int, total: int) -> None:
        """As Ranks.start calls it."""
        if self._progress is not None:
            task = self._tasks[rank]
            self._progress.update(task, description=f"rank {rank} {stage}", completed=done, total=total)
        elif done >= total and (rank, stage) not in self._said:
            self._said.add((rank, stage))
            log.info("rank %d: %s done (%d)", rank, stage, total)

    def close(self) -> None:
        """Takes the bars off the terminal."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
