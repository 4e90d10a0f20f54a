"""What `ep-server bench` cannot do: said in one line that names flag, value and what is allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ep_server
from ep_server.cli.bench.output import Output
from ep_server.cli.main import main
from ep_server.errors import ConfigError

DEMO = Path(ep_server.__file__).parent / "assets" / "demo_model"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("sideways",), "MODE = 'sideways': must be online or offline"),
        (("offline",), "model.path = '': must be a checkpoint directory"),
        (("offline", "--model", str(DEMO), "--batch", "1,x"), "--batch = '1,x': must be numbers from 1 to"),
        (("offline", "--model", str(DEMO), "--set", "scheduler.kv_blocks"), "must be section.field=value"),
        (
            ("offline", "--model", str(DEMO), "--set", "scheduler.kv_blocks=3"),
            "scheduler.kv_blocks = 3: must be 0, or at least 192 for 32 sequences of 96 tokens on a rank",
        ),
        (
            ("offline", "--model", str(DEMO), "--set", "cluster.nodes=2"),
            "cluster.nodes = 2: must be 1: off",
        ),
        (("--model", str(DEMO), "--set", "cluster.nodes=2"), "cluster.nodes = 2: must be 1: the"),
        (
            ("offline", "--model", str(DEMO), "--device", "abacus"),
            "'abacus': must be one of cpu, h100",
        ),
        (("--ranks", "2"), "parallel.ranks = 2: must be given only with --model"),
        (("--chart", "a.png"), "--chart = 'a.png': must be a name that ends with .svg"),
        (("--json-file", "/no/such/place/a.json"), "must be a file in a directory that is there"),
        (("--json-file", "a.svg", "--chart", "a.svg"), "--chart = 'a.svg': must be another file than"),
        (("--batch", "8"), "--batch = '8': must be given only with bench offline"),
        (("offline", "--rate", "1"), "--rate = 1.0: must be given only with bench online"),
        (("offline", "--address", "h:1"), "--address = 'h:1': must be given only with bench online"),
        (("--model", str(DEMO), "--address", "h:1"), "--address = 'h:1': must be given only with a server"),
        (("--address", "h:65536"), "'h:65536': must be host:port, with a port from 1 to 65535"),
        (("--address", ""), "--address = '': must be host:port"),
        (("--json-file", "/"), "--json-file = '/': must be a file in a directory that is there"),
        (
            ("offline", "--model", str(DEMO), "--prompt-tokens", "2000"),
            "--prompt-tokens + --new-tokens = 2064: must be at most 2048, the context",
        ),
        (
            ("--model", str(DEMO), "--new-tokens", "9", "--set", "model.max_context=40"),
            "--prompt-tokens + --new-tokens = 41: must be at most 40, the context",
        ),
    ],
)
def test_what_it_cannot_do_is_one_line(
    arguments: tuple[str, ...], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 1
    err = capfd.readouterr().err
    assert words in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--timeout", "inf"),
        ("--rate", "inf"),
        ("--bandwidth", "inf"),
        ("--link", "nan"),
        ("--slo-itl-ms", "inf"),
        ("--stream-interval", "1025"),
    ],
)
def test_numbers_have_a_range(flag: str, value: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", flag, value]) == 2
    assert f"Invalid value for '{flag}'" in capfd.readouterr().err


def test_a_disk_that_is_full_loses_no_figures(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"--json-file = '/dev/full': .* \(No space left on device\)"):
        Output(as_json=True, json_file="/dev/full", chart="").show({"tokens": 7}, lambda _: None, str)
    assert json.loads(capfd.readouterr().out)["tokens"] == 7
