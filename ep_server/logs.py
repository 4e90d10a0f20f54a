"""Logs on standard error: text for people, one JSON object per line for machines. Configured once."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

from ep_server.config import LogConfig

_TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One line per record: time (ISO 8601, UTC), level, rank if of one, logger, message, any traceback."""

    converter = time.gmtime  # type: ignore[assignment]

    def __init__(self, rank: int | None = None) -> None:
        super().__init__()
        self._rank = {} if rank is None else {"rank": rank}

    def format(self, record: logging.LogRecord) -> str:
        """The record as a JSON object without line breaks."""
        line: dict[str, str | int] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            **self._rank,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(config: LogConfig, stream: TextIO | None = None, *, rank: int | None = None) -> None:
    """Sends the records of this process to `stream`, standard error if None. rank: whose process it is."""
    handler = logging.StreamHandler(stream or sys.stderr)
    if config.format == "json":
        formatter: logging.Formatter = JsonFormatter(rank)
    else:
        of_rank = "" if rank is None else f"rank {rank}: "
        formatter = logging.Formatter(_TEXT.replace("%(message)s", f"{of_rank}%(message)s"), "%H:%M:%S")
    handler.setFormatter(formatter)
    logging.getLogger().handlers[:] = [handler]
    logging.getLogger("ep_server").setLevel(config.level.upper())
