"""Which doors grpc.doors opens."""

from __future__ import annotations

import logging
import sys

import pytest

from ep_server.config import GrpcConfig
from ep_server.errors import ConfigError
from ep_server.frontend.doors import STUBS, installed_doors, services


def names(doors: str) -> list[str]:
    return [service.full_name for service in services(installed_doors(GrpcConfig(doors=doors)))]


def test_all_opens_every_installed_door() -> None:
    assert len(names("all")) == len(STUBS) and "vllm.grpc.engine.VllmEngine" in names("all")


def test_names_choose_doors() -> None:
    assert names("") == [] and names(" vllm_engine, ") == ["vllm.grpc.engine.VllmEngine"]


def test_an_unknown_door_is_refused() -> None:
    with pytest.raises(ConfigError, match="'nonsense': must be all, or some of oip, vllm_engine"):
        installed_doors(GrpcConfig(doors="vllm_engine,nonsense"))


def test_a_door_without_its_package_is_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in [name for name in sys.modules if name.startswith("ep_server.frontend.doors.vllm_engine")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "smg_grpc_proto.generated", None)
    caplog.set_level(logging.INFO)
    assert "vllm.grpc.engine.VllmEngine" not in names("all")
    assert [record.message for record in caplog.records] == [
        "grpc.doors: vllm_engine is off, as smg-grpc-proto is not installed"
    ]
    with pytest.raises(ConfigError, match="left out, or its package smg-grpc-proto installed"):
        installed_doors(GrpcConfig(doors="vllm_engine"))
