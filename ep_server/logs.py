"""Logs on standard error: text for people, one JSON object per line for machines. Configured once.

A thread writes them, so a slow reader of the log never blocks the code that logs, such as the event loop.
SIGUSR1 makes a process write the Python stacks of its threads there, also while it hangs.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import TextIO

from ep_server.config import LogConfig

QUEUE_LINES = 10_000  # lines that wait for the log's reader; later ones are dropped
EXIT_SECONDS = 2.0  # for lines that wait when the process ends
_TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One line per record: time (ISO 8601, UTC), level, rank if of one, logger, message, any traceback.

    A record's `fields` (a dict in `extra`) are keys of the line too.
    """

    converter = time.gmtime  # type: ignore[assignment]

    def __init__(self, rank: int | None = None) -> None:
        super().__init__()
        self._rank = {} if rank is None else {"rank": rank}

    def format(self, record: logging.LogRecord) -> str:
        """The record as a JSON object without line breaks."""
        line: dict[str, str | int | float] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            **self._rank,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class LineQueue(QueueHandler):
    """Formats records where they are made; a thread writes the lines to a file descriptor.

    While QUEUE_LINES wait, new lines are dropped. The next line that is written is followed by their number.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(SimpleQueue())
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self._unwritten = 0
        self._dropped = 0
        threading.Thread(target=self._write_all, name="logs", daemon=True).start()

    def prepare(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        return self.format(record) + "\n"

    def enqueue(self, line: str) -> None:  # type: ignore[override]
        """Never waits."""
        with self._changed:
            if self._unwritten >= QUEUE_LINES:
                self._dropped += 1
                return
            self._unwritten += 1
            self.queue.put_nowait(line)

    def flush(self) -> None:
        """Waits until all lines are written, at most EXIT_SECONDS. Called as the process ends."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unwritten, EXIT_SECONDS)

    def _write_all(self) -> None:
        while True:
            self._write(self.queue.get())
            with self._changed:
                dropped, self._dropped = self._dropped, 0
            if dropped:
                self._write(self.prepare(_dropped_record(dropped)))
            with self._changed:
                self._unwritten -= 1
                self._changed.notify_all()

    def _write(self, line: str) -> None:
        data = line.encode(errors="backslashreplace")
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # whoever shares the descriptor made it so
                select.select([], [self._descriptor], [])
            except OSError:  # nobody will read it any more
                return


def _dropped_record(lines: int) -> logging.LogRecord:
    text = "%d log lines were dropped: %d waited for whoever reads standard error"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (lines, QUEUE_LINES), None)


def _standard_error() -> logging.Handler:
    try:
        descriptor = os.dup(sys.stderr.fileno())  # after a close, that number may belong to another file
        faulthandler.register(signal.SIGUSR1, descriptor)
        return LineQueue(descriptor)
    except (AttributeError, OSError):  # there is none, or it is no file
        return logging.StreamHandler()


def flush() -> bool:
    """Waits for lines that are not written yet. Returns: whether standard error takes more."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    try:
        return bool(select.select([], [sys.stderr], [], EXIT_SECONDS)[1])
    except (OSError, TypeError, ValueError):  # it is no file
        return True


def configure(config: LogConfig, stream: TextIO | None = None, *, rank: int | None = None) -> None:
    """Sends the records of this process to `stream`, at once; to standard error, through a thread, if None.

    Args:
        rank: whose process it is.
    """
    handler = _standard_error() if stream is None else logging.StreamHandler(stream)
    if config.format == "json":
        formatter: logging.Formatter = JsonFormatter(rank)
    else:
        of_rank = "" if rank is None else f"rank {rank}: "
        formatter = logging.Formatter(_TEXT.replace("%(message)s", f"{of_rank}%(message)s"), "%H:%M:%S")
    handler.setFormatter(formatter)
    logging.getLogger().handlers[:] = [handler]
    logging.getLogger("ep_server").setLevel(config.level.upper())
