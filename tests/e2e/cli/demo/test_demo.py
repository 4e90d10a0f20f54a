"""`ep-server demo` as a user runs it: real ranks, real gRPC, real arithmetic; and what a wrong sum does."""

from __future__ import annotations

import io
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from ep_server.cli.demo.run import DEMO_MODEL, Answer, DemoOptions, answer_line, main
from ep_server.cli.demo.sums import Sum, draw_held_out, is_held_out
from ep_server.client import Client
from ep_server.errors import StartupError

LINE = re.compile(r"^ *(\d+) ([+-]) +(\d+) = (-?\d+) +ok$", re.MULTILINE)


def run_here(options: DemoOptions, *, terminal: bool = False) -> tuple[int, str]:
    """(exit status, what was printed)"""
    out = io.StringIO()
    status = main(options, Console(file=out, force_terminal=terminal, width=100, highlight=False))
    return status, out.getvalue()


def test_the_command_answers_sums_it_was_never_trained_on() -> None:
    command = [sys.executable, "-m", "ep_server", "demo", "--seed", "7", "--questions", "20", "--ranks", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    answers = [(int(a), op, int(b), int(c)) for a, op, b, c in LINE.findall(done.stdout)]
    assert sorted(answers) == sorted((s.a, s.op, s.b, s.answer) for s in draw_held_out(7, 20))
    assert all(is_held_out(a, op, b) for a, op, b, _ in answers)
    assert "seed 7" in done.stdout and "20 of 20 right; 1" in done.stdout and "tokens/s" in done.stdout
    for row in ("dispatch", "combine"):
        for part in ("send", "wait", "total"):
            assert re.search(rf"{row} +\W? *{part}", done.stdout)
    assert re.search(r"metrics page: http://127\.0\.0\.1:\d+/metrics \(\d{3,} series\)", done.stdout)
    assert done.stdout.rstrip().endswith("stopped cleanly")
    assert (
        "  pip install 'ep-server[doors]' smg\n" in done.stdout and "smg launch --worker-urls" in done.stdout
    )
    assert "\x1b" not in done.stdout  # no terminal, no escape codes
    assert done.stderr == ""


def test_a_reader_that_leaves_is_no_error() -> None:
    command = [sys.executable, "-m", "ep_server", "demo", "--ranks", "1", "--questions", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stderr is not None
        try:
            assert running.stdout.readline().startswith("demo_model")
            running.stdout.close()  # as `| head -1` does
            errors = running.stderr.read()
            assert running.wait(timeout=60) == 0
        finally:
            running.kill()
    assert errors == ""


def test_keep_serves_until_interrupted() -> None:
    command = [sys.executable, "-m", "ep_server", "demo", "--ranks", "1", "--questions", "2", "--keep"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            printed = ""
            while "serving until Ctrl-C" not in printed:
                line = running.stdout.readline()
                assert line, printed
                printed += line
            address = re.search(r"gRPC at (\S+),", printed)
            assert address is not None
            with Client(address[1]) as client:
                assert client.serving()
                assert (
                    client.complete("7 + 12 =", timeout=60).text == "  19"
                )  # greedy by generation_config.json
            running.send_signal(signal.SIGINT)
            rest, _ = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 0
    assert rest == "stopped cleanly\n"


def test_a_wrong_sum_is_a_failure(tmp_path: Path) -> None:
    model = tmp_path / "confused"
    shutil.copytree(DEMO_MODEL, model)
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"][[3, 4]] = weights["lm_head.weight"][[4, 3]]  # writes 4 for 3 and 3 for 4
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    sums = draw_held_out(1, 8)
    spoilt = sum(any(digit in str(each.answer) for digit in "34") for each in sums)
    assert 0 < spoilt < len(sums)
    status, text = run_here(DemoOptions(ranks=1, seed=1, questions=8, model=model), terminal=True)
    assert status == 1
    assert text.count("wrong, it is") == spoilt
    assert f"{8 - spoilt} of 8 right" in text and "stopped cleanly" in text


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError) as raised:
        run_here(DemoOptions(ranks=1, model=tmp_path / "nothing"))
    assert "model.path" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("  19", "    7 +  12 = 19    ok"),
        ("  18", "    7 +  12 = 18    wrong, it is 19"),
        ("", "    7 +  12 =       wrong, it is 19"),
        ("what", "    7 +  12 = what  wrong, it is 19"),
    ],
)
def test_answer_lines(text: str, line: str) -> None:
    assert answer_line(Answer(Sum(7, "+", 12), text, 5)).plain == line
