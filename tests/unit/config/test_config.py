"""Sources and their order, types and ranges of the configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ep_server.config import Config, field_type, fields, read_sources
from ep_server.errors import ConfigError


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[grpc]\nport = 1\nhost = "a"\ndrain_seconds = 3\n[parallel]\nranks = 2\n')
    environ = {"EP_SERVER_GRPC__PORT": "2", "EP_SERVER_PARALLEL__RANKS": "3", "EP_SERVER_OTHER": "x"}
    config = Config.load(str(file), {"grpc.port": 5, "grpc.host": None}, environ)
    assert (config.grpc.port, config.parallel.ranks, config.grpc.host) == (5, 3, "a")
    assert config.grpc.drain_seconds == 3.0 and isinstance(config.grpc.drain_seconds, float)


def test_values_and_back() -> None:
    config = Config.load(None, {"grpc.port": 0, "scheduler.prefix_cache": "off"}, {})
    assert not config.scheduler.prefix_cache
    assert Config.from_values(config.values()) == config
    assert len(config.values()) == len(list(fields()))


@pytest.mark.parametrize(
    "values, message",
    [
        ({"grpc.port": 70000}, "grpc.port = 70000: must be 0 to 65535"),
        ({"grpc.port": "x"}, "grpc.port = 'x': must be a number (int)"),
        ({"grpc.port": 1.5}, "grpc.port = 1.5: must be of type int"),
        ({"grpc.port": True}, "grpc.port = True: must be of type int"),
        ({"model.max_context": -1}, "model.max_context = -1: must be at least 0"),
        ({"model.dtype": "int8"}, "model.dtype = 'int8': must be one of auto, float32, bfloat16"),
        ({"scheduler.prefix_cache": "maybe"}, "scheduler.prefix_cache = 'maybe': must be true or false"),
        ({"exchange.num_banks": 6}, "exchange.num_banks = 6: must be a power of two, 2 to 16"),
        ({"scheduler.itl_budget_ms": -0.5}, "scheduler.itl_budget_ms = -0.5: must be -1, or 0 to 60000"),
        ({"exchange.timeout_seconds": "nan"}, "exchange.timeout_seconds = nan: must be 0.01 to 3600"),
        ({"grpc.prt": 1}, "grpc.prt = 1: must be a known field; did you mean grpc.port?"),
        ({"grpc.tls_cert": "c"}, "grpc.tls_key = '': must be given together with grpc.tls_cert"),
        ({"grpc.tls_client_ca": "c"}, "grpc.tls_client_ca = 'c': must be given only with grpc.tls_cert"),
    ],
)
def test_a_bad_value_is_one_line_with_field_value_and_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"\A{re.escape(message)}\Z"):
        Config.from_values(values)


def test_a_bad_environment_variable_names_the_field() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.ranks = '0x': must be a number"):
        Config.load(None, None, {"EP_SERVER_PARALLEL__RANKS": "0x"})
    with pytest.raises(ConfigError, match=r"grpc\.bogus = '1': must be a known field"):
        Config.load(None, None, {"EP_SERVER_GRPC__BOGUS": "1"})


@pytest.mark.parametrize(
    "text, message",
    [("[grpc", "valid TOML"), ("grpc = 1", "grpc = 1: must be a table"), ("[grpc]\nx = 1", "grpc.x = 1")],
)
def test_a_bad_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        Config.load(str(file), None, {})
    with pytest.raises(ConfigError, match=r"--config = .*a readable file"):
        Config.load(str(tmp_path / "none"), None, {})


def test_every_default_is_within_its_range_and_has_a_help_text() -> None:
    Config().validate()
    for name, section, item in fields():
        assert type(item.default) is field_type(section, item.name), name
        assert item.metadata["help"], name


def test_every_value_has_the_source_that_wins(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text("[grpc]\nport = 1\nhost = '::'\n[log]\nlevel = 'debug'\n")
    environ = {"EP_SERVER_GRPC__PORT": "2", "EP_SERVER_LOG__LEVEL": "info", "LWS_GROUP_SIZE": "4"}
    given = read_sources(str(file), {"grpc.port": 3, "grpc.max_streams": None}, environ)
    assert {name: (one.value, one.source) for name, one in given.items()} == {
        "grpc.port": (3, "flag"),
        "grpc.host": ("::", str(file)),
        "log.level": ("info", "EP_SERVER_LOG__LEVEL"),
        "cluster.nodes": ("4", "LeaderWorkerSet"),
    }


@pytest.mark.parametrize(
    ("name", "meant"), [("grpc.prot", "grpc.port"), ("scheduler.blocksize", "scheduler.block_size")]
)
def test_an_unknown_field_names_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {meant}"):
        Config.from_values({name: 1})


def test_who_hands_off_needs_an_address() -> None:
    assert Config.from_values({"handoff.host": ""}).handoff.host == ""
    with pytest.raises(ConfigError, match=r"handoff\.host = '': must be an address of this host"):
        Config.from_values({"handoff.host": "", "handoff.role": "prefill"})


@pytest.mark.parametrize(
    ("device", "nodes", "tokens"), [("cpu", 1, 256), ("cuda", 1, 8192), ("cpu", 2, 256), ("cuda", 2, 256)]
)
def test_step_tokens_of_zero_follow_device_and_nodes(device: str, nodes: int, tokens: int) -> None:
    values = {"parallel.device": device, "cluster.nodes": nodes}
    assert Config.from_values(values).step_tokens == tokens
    assert Config.from_values(values | {"scheduler.max_step_tokens": 7}).step_tokens == 7
