"""libfabric itself: which one is loaded, which provider is chosen and what is said when none will do."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ep_server import _C, __version__
from ep_server.errors import ConfigError, InvalidArgument, StartupError
from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.fabric.bootstrap import Introduction, agreed, from_store
from ep_server.exchange.fabric.exchange import FabricExchange, FabricOptions, providers
from tests.support.exchange.ranks import run_outcomes
from tests.support.fabric.fabric_ends import LIBRARIES, ends, loopback, needs

SPEC = ExchangeSpec(0, 1, (0, 0), max_tokens=4, hidden=64, top_k=2)
NATIVE_TCP = {"system": "net", "wheel": "tcp"}  # 1.17 and 2.x name the same provider differently


@pytest.mark.parametrize("library", ["system", "wheel"])
def test_the_native_provider_is_chosen_by_capability_and_logged(
    library: str, caplog: pytest.LogCaptureFixture
) -> None:
    needs(library)
    with caplog.at_level(logging.INFO):
        exchange = FabricExchange(SPEC, loopback(library))
    exchange.close()
    assert f"provider {NATIVE_TCP[library]}," in exchange.description
    assert exchange.description in caplog.text
    names = [p.name for p in providers(loopback(library)) if not p.missing]
    assert names[0] == NATIVE_TCP[library]


@pytest.mark.parametrize("library", ["system", "wheel"])
def test_a_forced_provider_is_taken_or_refused_with_the_reason(library: str) -> None:
    needs(library)
    exchange = FabricExchange(SPEC, loopback(library, provider="tcp;ofi_rxm"))
    assert "provider tcp;ofi_rxm" in exchange.description
    exchange.close()
    with pytest.raises(StartupError, match="no way for provider efa"):
        FabricExchange(SPEC, loopback(library, provider="efa"))
    with pytest.raises(StartupError, match="shm on shm: reaches no other host"):
        FabricExchange(SPEC, FabricOptions(library=LIBRARIES[library], provider="shm"))
    with pytest.raises(StartupError, match="nosuch0"):
        FabricExchange(SPEC, loopback(library, domain="nosuch0"))
    other = {"system": "tcp", "wheel": "net"}[library]  # here it would come with a layer, or not at all
    with pytest.raises(StartupError, match=f"no way for provider {other}"):
        FabricExchange(SPEC, loopback(library, provider=other))


def test_a_library_that_is_not_there_is_named() -> None:
    needs("system")
    with pytest.raises(StartupError, match=r"/nowhere/libfabric\.so\.1"):
        providers(FabricOptions(library="/nowhere/libfabric.so.1"))
    with pytest.raises(StartupError, match="fi_getinfo"):  # a library, but not this one
        providers(FabricOptions(library="libm.so.6"))


def test_a_build_without_headers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "FABRIC", False)
    with pytest.raises(StartupError, match="libfabric-dev"):
        FabricExchange(SPEC, FabricOptions())


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
    exchange = FabricExchange(SPEC, loopback())
    exchange.connect([exchange.address], 1)
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    received = exchange.dispatch_send(x, torch.tensor([[0, 1], [1, -1]]), torch.ones(2, 2)).recv()
    assert exchange.combine_send(received.rows, received).recv()[:, 0].tolist() == [2, 1]
    assert exchange.writes == 0
    exchange.close()
    exchange.close()
    with pytest.raises(InvalidArgument, match="closed"):
        exchange.barrier()
    with pytest.raises(InvalidArgument, match="closed"):
        _ = exchange.address


def introduced(**change: object) -> Introduction:
    spec = replace(SPEC, num_ranks=2, rank=1)
    fields = {"version": __version__, "spec": spec, "hosts": (0, 1), "address": (b"a", 0, 1, 2), "session": 1}
    return Introduction(**{**fields, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": "0.0.1"}, "version of rank 1 = '0.0.1'"),
        (
            {"spec": replace(SPEC, num_ranks=2, rank=1, hidden=128)},
            "hidden of rank 1 = 128: must be 64, as rank 0",
        ),
        ({"spec": replace(SPEC, num_ranks=2, rank=0)}, "rank of rank 1 = 0"),
        ({"spec": replace(SPEC, num_ranks=2, rank=1, placement=(0, 1))}, "placement of rank 1"),
        ({"hosts": (0, 0)}, r"hosts of rank 1 = \(0, 0\): must be \(0, 1\), as rank 0"),
        ({"address": None, "error": "no network"}, "rank 1: no network"),
    ],
)
def test_ranks_that_do_not_agree_are_refused_with_the_difference(
    change: dict[str, object], said: str
) -> None:
    mine = introduced(spec=replace(SPEC, num_ranks=2))
    assert agreed([mine, introduced()], mine.spec) == [(b"a", 0, 1, 2)] * 2
    with pytest.raises(StartupError, match=said):
        agreed([mine, introduced(**change)], mine.spec)


def test_an_introduction_is_read_back_from_json_and_nothing_else() -> None:
    one = introduced()
    assert Introduction.decode(one.encode()) == one
    for garbage in (b"", b"[]", b"{}", b"\x80\x04.", one.encode().replace("session", "sessions")):
        with pytest.raises(StartupError, match="not of this version"):
            Introduction.decode(garbage)


def nothing(exchange: FabricExchange) -> None:
    """Started is all."""


def test_a_rank_without_a_network_is_told_to_all_others(tmp_path: Path) -> None:
    needs("system")
    both = ends(tmp_path, 2, loopback())
    both[1] = replace(both[1], options=loopback(provider="efa"))
    spec = {"placement": (0, 1), "max_tokens": 4, "hidden": 64, "top_k": 2}
    for outcome in run_outcomes(nothing, 2, spec, 30, ends=both):
        assert isinstance(outcome.error, StartupError)
        assert "no way for provider efa" in str(outcome.error)


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    needs("system")
    store = dist.FileStore(str(tmp_path / "meeting"), 2)
    with pytest.raises(StartupError, match="rank 1 has not come to the rendezvous"):
        from_store(store, "group", replace(SPEC, num_ranks=2), loopback(connect_seconds=0.5))
