"""`ep-server config`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ep_server.cli import config
from ep_server.config import Config
from ep_server.errors import ConfigError


def test_effective_says_every_value_and_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "server.toml"
    file.write_text("[grpc]\nport = 1234\nhost = '::1'\n")
    monkeypatch.setenv("EP_SERVER_GRPC__HOST", "::")
    config.command(effective=True, config=str(file))
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    found = {name: (json.loads(value), source) for name, value, source in lines}
    expected = Config.load(str(file)).values()
    assert {name: value for name, (value, _) in found.items()} == expected
    assert found["grpc.port"] == (1234, str(file))
    assert found["grpc.host"] == ("::", "EP_SERVER_GRPC__HOST")
    assert found["log.level"][1] == "default"


def test_check_reads_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EP_SERVER_GRPC__PORT", "wrong")
    file = tmp_path / "server.toml"
    file.write_text("[grpc]\nport = 1234\n")
    config.command(check=str(file))
    assert capsys.readouterr().out == f"{file}: 1 option(s), all valid\n"
    file.write_text("[grpc]\nprot = 1234\n")
    with pytest.raises(ConfigError, match=r"did you mean grpc\.port"):
        config.command(check=str(file))


@pytest.mark.parametrize(
    "given", [{"toml": True, "check": "x"}, {"effective": True, "toml": True}, {"config": "x"}]
)
def test_options_that_do_not_fit_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        config.command(**given)
