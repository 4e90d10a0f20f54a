"""What a log line looks like."""

from __future__ import annotations

import faulthandler
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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


def test_fields_of_a_record_are_keys_of_its_line(stream: io.StringIO) -> None:
    logs.configure(LogConfig(format="json"), stream)
    fields = {"request_id": "r", "tokens": 3, "ttft_ms": 1.5}
    logging.getLogger("ep_server.some").info("done", extra={"fields": fields})
    assert json.loads(stream.getvalue()).items() >= {"message": "done", **fields}.items()


@pytest.mark.usefixtures("stream")
def test_no_line_goes_to_a_file_that_took_the_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read, write = os.pipe()
    with (tmp_path / "other").open("w+b") as other, os.fdopen(read, "rb") as lines:
        monkeypatch.setattr(sys, "stderr", os.fdopen(write, "w"))
        logs.configure(LogConfig())
        faulthandler.unregister(signal.SIGUSR1)
        sys.stderr.close()
        os.dup2(other.fileno(), write)
        logging.getLogger("ep_server.some").info("hello")
        logging.getLogger().handlers[0].flush()
        os.close(write)
        assert lines.readline().endswith(b"ep_server.some: hello\n")
        assert other.seek(0) == 0 and other.read() == b""


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


UNREAD = """
import logging
from ep_server import logs
from ep_server.config import LogConfig
logs.configure(LogConfig())
for i in range(3 * logs.QUEUE_LINES):
    logging.getLogger("ep_server.some").info("line %d", i)
print("done", flush=True)
"""


def test_nobody_who_logs_waits_for_the_reader() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", UNREAD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "done\n"  # no line was read yet
        assert process.wait() == 0


def test_dropped_lines_are_counted(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    number = 3 * logs.QUEUE_LINES
    reader, writer = os.pipe()
    with os.fdopen(reader) as lines, os.fdopen(writer, "w") as error:
        monkeypatch.setattr(sys, "stderr", error)
        logs.configure(LogConfig())
        log = logging.getLogger("ep_server.some")
        for i in range(number):
            log.info("line %d", i)
        read = dropped = 0
        while read + dropped < number:
            line = lines.readline()
            found = re.search(r"WARNING ep_server\.logs: (\d+) log lines were dropped", line)
            read, dropped = (read + 1, dropped) if found is None else (read, dropped + int(found[1]))
        assert dropped > 0 and read >= logs.QUEUE_LINES
        log.info("last")
        assert lines.readline().endswith(" last\n")


def test_lines_that_wait_are_written_at_the_end() -> None:
    few = UNREAD.replace("3 * logs.QUEUE_LINES", "100")
    done = subprocess.run([sys.executable, "-c", few], capture_output=True, text=True, check=True)
    assert [line.rpartition(" ")[2] for line in done.stderr.splitlines()] == [str(i) for i in range(100)]


HANGING = """
from ep_server import logs
from ep_server.config import LogConfig

def hangs():
    print("ready", flush=True)
    input()

logs.configure(LogConfig())
hangs()
print("went on", flush=True)
"""


def test_a_signal_shows_where_a_process_hangs() -> None:
    """The runbook's `kill -USR1 PID`: the process goes on afterwards."""
    pipe = subprocess.PIPE
    line = [sys.executable, "-c", HANGING]
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        stacks = iter(process.stderr.readline, "")
        assert any("in hangs" in line for line in stacks)
        out, _ = process.communicate("\n", timeout=30)
    assert out == "went on\n" and process.returncode == 0
