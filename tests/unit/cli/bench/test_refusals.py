"""What `ep-server bench` refuses: one line names the option, its value and what is allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import ep_server
from ep_server.cli.bench.report import Output
from ep_server.cli.main import main
from ep_server.errors import ConfigError

DEMO = Path(ep_server.__file__).parent / "assets" / "demo_model"
MODEL = f"--model={DEMO}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("offline", "--model = '': must be a checkpoint directory"),
        ("offline --model=/none", "--model = '/none': must be a"),
        (f"online {MODEL} --ranks=0", "--ranks = 0: must be 1 to 64"),
        (f"offline {MODEL} --batch=1,x", "--batch = '1,x': must be numbers from 1 to"),
        (f"offline {MODEL} --set=scheduler.kv_blocks", "must be section.field=value"),
        (
            f"offline {MODEL} --set=scheduler.kv_blocks=3",
            "scheduler.kv_blocks = 3: must be 0, or at least 192 for 32 sequences of 96 tokens on a rank",
        ),
        (f"offline {MODEL} --set=cluster.nodes=2", "cluster.nodes = 2: must be 1: bench offline"),
        (f"online {MODEL} --set=cluster.nodes=2", "cluster.nodes = 2: must be 1: the"),
        (f"offline {MODEL} --device=abacus", "--device = 'abacus': must be one of cpu, h100"),
        ("online --ranks=2", "--ranks = 2: must be given only with --model"),
        ("online --set=grpc.port=1", "--set = ['grpc.port=1']: must be given only with --model"),
        (f"online {MODEL} --address=h:1", "--address = 'h:1': must be given only without --model"),
        ("online --chart=a.png", "--chart = 'a.png': must be a name that ends with .svg"),
        ("online --json-file=/no/such/place/a.json", "must be a writable file in an existing directory"),
        ("online --json-file=/", "--json-file = '/': must be a writable file in an existing directory"),
        ("offline --json-file=a.svg --chart=a.svg", "--chart = 'a.svg': must be a file other than"),
        ("online --address=h:65536", "'h:65536': must be host:port, with a port from 1 to 65535"),
        ("online --address=", "--address = '': must be host:port"),
        ("online --address=localhost", "--address = 'localhost': must be host:port"),
        (
            f"offline {MODEL} --prompt-tokens=2000",
            "--prompt-tokens + --new-tokens = 2064: must be at most 2048, the model's context",
        ),
        (
            f"online {MODEL} --new-tokens=9 --set=model.max_context=40",
            "--prompt-tokens + --new-tokens = 41: must be at most 40, the model's context",
        ),
    ],
)
def test_refusal_is_one_line(arguments: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments.split()]) == 1
    err = capfd.readouterr().err
    assert words in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("sideways", "No such command 'sideways'"),
        ("online --batch=8", "No such option: --batch"),
        ("offline --rate=1", "No such option: --rate"),
        ("offline --address=h:1", "No such option: --address"),
        ("online --timeout=inf", "Invalid value for '--timeout'"),
        ("online --rate=inf", "Invalid value for '--rate'"),
        ("offline --bandwidth=inf", "Invalid value for '--bandwidth'"),
        ("offline --link=nan", "Invalid value for '--link'"),
        ("online --slo-itl-ms=inf", "Invalid value for '--slo-itl-ms'"),
        ("online --stream-interval=1025", "Invalid value for '--stream-interval'"),
    ],
)
def test_usage_errors_name_the_option(arguments: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments.split()]) == 2
    assert words in capfd.readouterr().err


class Tokens:
    """A report of one figure."""

    def values(self) -> dict[str, Any]:
        return {"tokens": 7}

    def print(self, console: Console) -> None:
        raise AssertionError("JSON is printed")

    def chart(self) -> str:
        raise AssertionError("no chart was asked for")


def test_full_disk_still_prints_the_figures(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"--json-file = '/dev/full': .* \(No space left on device\)"):
        Output(as_json=True, json_file="/dev/full", chart="").show(Tokens())
    assert json.loads(capfd.readouterr().out)["tokens"] == 7
