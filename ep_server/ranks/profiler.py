"""Profiles the steps of one rank: a torch profile (Chrome trace) and the step trace, as files.

Files go into the folder that the operator named and nowhere else. Used in the thread of the rank's loop,
which pauses while the files are written.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from torch.autograd.profiler import profile, record_function

from ep_server.errors import InternalError, Unavailable, WrongState
from ep_server.orders import StartProfile
from ep_server.records import StepTrace

_NAME = re.compile(r"[0-9A-Za-z-]{1,64}")  # no separator, no dot: it cannot leave the folder


class StepProfiler:
    """At most one profile at a time. on_device: record the GPU too."""

    def __init__(self, directory: str, rank: int, *, on_device: bool) -> None:
        self.running = False
        self._directory = directory
        self._rank = rank
        self._on_device = on_device
        self._recording: _Recording | None = None
        self._files: tuple[Path, ...] = ()
        self._most = 0  # steps of this profile
        self._steps: list[StepTrace] = []

    def start(self, order: StartProfile) -> None:
        """Begins to record. Raises: Unavailable if the folder cannot be written; WrongState if it records."""
        if self.running:
            raise WrongState("it records a profile already")
        if not _NAME.fullmatch(order.name):
            raise InternalError(f"{order.name!r} is not the name of a profile")
        base = Path(self._directory) / f"{order.name}-rank{self._rank}"
        self._files = (base.with_suffix(".trace.json"), base.with_suffix(".steps.json"))
        with ExitStack() as undo:
            for file in self._files:
                _create(file)
                undo.callback(file.unlink, missing_ok=True)
            self._recording = _Recording(on_device=self._on_device)
            undo.pop_all()
        self._most, self._steps = order.steps, []
        self.running = True

    def stepped(self, step: StepTrace) -> None:
        """A step ended. Stops recording after the last step ordered."""
        if self._recording is None:
            return
        self._steps.append(step)
        if len(self._steps) < self._most:
            self._recording.mark()
        else:
            self._write(self._recording)

    def stop(self) -> tuple[str, ...]:
        """Writes the files, unless the last step ordered did.

        Returns: their paths; none without a profile: the rank has joined since it began.
        """
        if not self.running:
            return ()
        if self._recording is not None:
            self._write(self._recording)
        self.running = False
        return tuple(map(str, self._files))

    def _write(self, recording: _Recording) -> None:
        self._recording = None
        trace, steps = self._files
        recording.write(trace)
        records = {"rank": self._rank, "steps": [asdict(step) for step in self._steps]}
        steps.write_text(json.dumps(records, indent=1) + "\n")


def _create(file: Path) -> None:
    """Creates an empty file that was not there, so that nothing is overwritten and no link is followed."""
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY, 0o644))
    except OSError as error:
        raise Unavailable(f"profile.directory: cannot create {file}: {error.strerror}") from error


class _Recording:
    """A profile of torch that runs, with a mark around every step.

    Not torch.profiler.profile: its first start imports torch's compiler, which takes seconds.
    """

    def __init__(self, *, on_device: bool) -> None:
        if on_device:  # as torch sets them where its compiler captures graphs: a teardown would break ours
            os.putenv("DISABLE_CUPTI_LAZY_REINIT", "1")
            os.putenv("TEARDOWN_CUPTI", "0")
        self._profile = cast(Any, profile(use_device="cuda" if on_device else None, use_kineto=True))
        self._profile.__enter__()
        self._count = 0
        self._mark: Any = None
        self.mark()

    def mark(self) -> None:
        """A step ended, another begins."""
        self._end_mark()
        self._mark = cast(Any, record_function(f"ProfilerStep#{self._count}"))
        self._mark.__enter__()
        self._count += 1

    def write(self, file: Path) -> None:
        """Stops, and writes the trace."""
        self._end_mark()
        self._profile.__exit__(None, None, None)
        self._profile.export_chrome_trace(str(file))

    def _end_mark(self) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
