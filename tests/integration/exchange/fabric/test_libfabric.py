"""libfabric itself: which one is loaded, which provider is chosen and what is said when none will do."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ep_server import _C
from ep_server.errors import ConfigError, InvalidArgument, StartupError
from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.fabric.link import FabricLink
from ep_server.exchange.fabric.settings import FabricOptions
from tests.support.fabric.fabric_ends import LIBRARIES, loopback, needs, providers

SPEC = ExchangeSpec(0, 1, (0, 0), max_tokens=4, hidden=64, top_k=2)
NATIVE_TCP = {"system": "net", "wheel": "tcp"}  # 1.17 and 2.x name the same provider differently


@pytest.mark.parametrize("library", ["system", "wheel"])
def test_the_native_provider_is_chosen_by_capability_and_logged(
    library: str, caplog: pytest.LogCaptureFixture
) -> None:
    needs(library)
    with caplog.at_level(logging.INFO):
        exchange = FabricLink(SPEC, loopback(library))
    exchange.close()
    assert f"provider {NATIVE_TCP[library]}," in exchange.description
    assert exchange.description in caplog.text
    assert providers(loopback(library))[0] == NATIVE_TCP[library]


@pytest.mark.parametrize("library", ["system", "wheel"])
def test_a_forced_provider_is_taken_or_refused_with_the_reason(library: str) -> None:
    needs(library)
    exchange = FabricLink(SPEC, loopback(library, provider="tcp;ofi_rxm"))
    assert "provider tcp;ofi_rxm" in exchange.description
    exchange.close()
    with pytest.raises(StartupError, match="cannot use provider efa"):
        FabricLink(SPEC, loopback(library, provider="efa"))
    with pytest.raises(StartupError, match="shm on shm: reaches no other host"):
        FabricLink(SPEC, FabricOptions(library=LIBRARIES[library], provider="shm"))
    with pytest.raises(StartupError, match="nosuch0"):
        FabricLink(SPEC, loopback(library, domain="nosuch0"))
    other = {"system": "tcp", "wheel": "net"}[library]  # here it would come with a layer, or not at all
    with pytest.raises(StartupError, match=f"cannot use provider {other}"):
        FabricLink(SPEC, loopback(library, provider=other))


def test_a_library_that_is_not_there_is_named() -> None:
    needs("system")
    with pytest.raises(StartupError, match=r"/nowhere/libfabric\.so\.1"):
        providers(FabricOptions(library="/nowhere/libfabric.so.1"))
    with pytest.raises(StartupError, match="fi_getinfo"):  # a library, but not this one
        providers(FabricOptions(library="libm.so.6"))


def test_a_build_without_headers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "FABRIC", False)
    with pytest.raises(StartupError, match="libfabric-dev"):
        FabricLink(SPEC, FabricOptions())


INTERRUPTED = """
import signal, sys
from ep_server import _C
from ep_server.exchange.fabric.settings import FabricOptions
_C.fabric_providers(FabricOptions(sys.argv[1]).native())
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted", flush=True)
signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.parametrize("library", ["system", "wheel"])
def test_signals_do_what_they_did_before_it_was_loaded(library: str, tmp_path: Path) -> None:
    needs(library)
    line = [sys.executable, "-c", INTERRUPTED, LIBRARIES[library]]
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    ended = subprocess.run(
        line, cwd=tmp_path, env=path, capture_output=True, text=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "interrupted\n"), ended.stderr
    assert list(tmp_path.iterdir()) == []  # no backtrace


def test_nothing_links_libfabric() -> None:
    needed = subprocess.run(["ldd", _C.__file__], capture_output=True, text=True, check=True).stdout
    assert "libc.so" in needed
    assert "libfabric" not in needed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("traffic_class", -2),
        ("traffic_class", 1 << 32),
        ("connect_seconds", 0.0),
        ("linger_seconds", -1.0),
    ],
)
def test_a_setting_out_of_range_names_its_field(field: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        FabricOptions(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_one_rank_alone_exchanges_with_itself_and_closes_twice() -> None:
    needs("system")
    link = FabricLink(SPEC, loopback())
    exchange = link.exchange()
    link.connect([link.address], 1)
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    received = exchange.dispatch_send(x, torch.tensor([[0, 1], [1, -1]]), torch.ones(2, 2)).recv()
    assert exchange.combine_send(received.rows, received).recv()[:, 0].tolist() == [2, 1]
    assert link.writes == 0
    exchange.close()
    exchange.close()
    with pytest.raises(InvalidArgument, match="closed"):
        exchange.barrier()
    with pytest.raises(InvalidArgument, match="closed"):
        _ = link.address
