"""Shows progress: bars on a terminal, otherwise a line per finished stage."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Bars:
    """Named bars below the output. Without a terminal, `say` is called when a stage is done.

    Args:
        console: shows the bars; None = no terminal.
        say: called as say("rank 0 weights: 3/3"), once per name and stage.
    """

    def __init__(self, console: Console | None, say: Callable[[str], object]) -> None:
        live = console is not None and console.is_terminal
        self._say = None if live else say
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not live)
        self._tasks: dict[str, TaskID] = {}
        self._said: set[str] = set()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes the bars from the terminal. Idempotent."""
        self._progress.stop()

    def show(self, name: str, done: int, total: int, stage: str = "") -> None:
        """Sets the bar of `name`. The first call adds it; a new stage reuses it."""
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total)
        text = f"{name} {stage}".rstrip()
        self._progress.update(self._tasks[name], description=text, completed=done, total=total)
        if self._say is not None and done >= total and text not in self._said:
            self._said.add(text)
            self._say(f"{text}: {done}/{total}")

    def loading(self, rank: int, stage: str, done: int, total: int) -> None:
        """Progress callback for Ranks.start."""
        self.show(f"rank {rank}", done, total, stage)
