"""What a log line looks like."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from ep_server import logs
from ep_server.config import LogConfig


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """A place for log lines; the loggers are as before afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("ep_server")
    before = root.handlers[:], ours.level
    yield io.StringIO()
    root.handlers[:], level = before
    ours.setLevel(level)


def test_json_is_one_object_per_line(stream: io.StringIO) -> None:
    logs.configure(LogConfig(format="json", level="warning"), stream)
    log = logging.getLogger("ep_server.some")
    log.info("not this")
    log.warning("two\nlines, %s", "grün")
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("it failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["level"], first["logger"], first["message"]) == (
        "warning",
        "ep_server.some",
        "two\nlines, grün",
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert "ValueError: broken" in second["traceback"]


def test_text_is_for_people(stream: io.StringIO) -> None:
    logs.configure(LogConfig(level="debug"), stream)
    logging.getLogger("ep_server.some").debug("hello")
    assert re.fullmatch(r"\d\d:\d\d:\d\d DEBUG   ep_server\.some: hello\n", stream.getvalue())


def test_lines_of_a_rank_say_whose_they_are(stream: io.StringIO) -> None:
    log = logging.getLogger("ep_server.some")
    logs.configure(LogConfig(), stream, rank=3)
    log.info("hello")
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO    ep_server\.some: rank 3: hello\n", stream.getvalue())
    stream.truncate(stream.seek(0))
    logs.configure(LogConfig(format="json"), stream, rank=3)
    log.info("hello")
    line = json.loads(stream.getvalue())
    assert (line["rank"], line["message"]) == (3, "hello")
