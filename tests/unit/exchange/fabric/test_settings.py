"""Traffic settings: each reaches the provider's own before it is loaded, or is refused by name.

The provider is this machine's, behind a wrapper that calls it by the name of one over a card.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ep_server.config import Config
from ep_server.errors import ConfigError, StartupError
from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.fabric.link import FabricLink
from ep_server.exchange.fabric.settings import FabricOptions
from ep_server.ranks.exchanges import fabric_options
from tests.support.fabric.fabric_ends import needs
from tests.support.fabric.wrapped import Wrapped

SPEC = ExchangeSpec(0, 1, (0, 0), max_tokens=4, hidden=64, top_k=2)
LOW_LATENCY, DSCP_26 = 0x201, 0x100 | 26
WRITES_IN_ORDER = (1 << 4) | (1 << 35)  # FI_ORDER_WAW, FI_ORDER_RMA_WAW
DEPTH = (
    "FI_VERBS_TX_SIZE", "FI_VERBS_RX_SIZE", "FI_OFI_RXM_TX_SIZE", "FI_OFI_RXM_MSG_TX_SIZE",
    "FI_OFI_RXM_MSG_RX_SIZE", "FI_EFA_TX_SIZE", "FI_TCP_TX_SIZE", "FI_NET_TX_SIZE",
)  # fmt: skip
INTERFACE = ("FI_TCP_IFACE", "FI_NET_IFACE", "FI_VERBS_IFACE", "FI_SOCKETS_IFACE")

Open = Callable[..., list[str]]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens an endpoint on a wrapped provider with these settings; what the library was told, in order."""
    needs("system")
    record = tmp_path / "record"

    def told(wrapped: Wrapped, **settings: Any) -> list[str]:
        library = str(wrapped.build(tmp_path))
        FabricLink(SPEC, FabricOptions(library, address="127.0.0.1", **settings)).close()
        return record.read_text(encoding="utf-8").splitlines()

    yield told
    for line in record.read_text(encoding="utf-8").splitlines() if record.exists() else []:
        kind, _, setting = line.partition(" ")
        name = setting.partition("=")[0]
        if kind == "env" and name not in os.environ:  # set beneath Python, for this test alone
            os.unsetenv(name)


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("verbs;ofi_rxm", {"gid_index": 3}, ["env FI_VERBS_GID_IDX=3"]),
        ("verbs;ofi_rxm", {"interface": "lo"}, [f"env {name}=lo" for name in INTERFACE]),
        ("efa", {"queue_depth": 512}, [*(f"env {name}=512" for name in DEPTH), "hint tx_size=512"]),
        ("verbs;ofi_rxm", {"domain": "lo"}, ["hint domain=lo"]),
        ("efa", {"traffic_class": LOW_LATENCY}, [f"hint tclass={LOW_LATENCY}"]),
        ("cxi", {"traffic_class": DSCP_26}, [f"hint tclass={DSCP_26}"]),
        ("verbs;ofi_rxm", {"adaptive_routing": False}, [f"hint msg_order={WRITES_IN_ORDER}"]),
    ],
)
def test_a_setting_reaches_the_provider(
    name: str, settings: dict[str, Any], told: list[str], opened: Open
) -> None:
    lines = opened(Wrapped(name, emulated=0), **settings)
    assert set(told) <= set(lines)
    # All of the environment was there when the library was loaded.
    assert [line.split()[0] for line in lines] == sorted(line.split()[0] for line in lines)


def test_what_is_not_set_is_left_to_the_provider(opened: Open) -> None:
    lines = opened(Wrapped())
    assert set(lines) - {f"env {k}={v}" for k, v in os.environ.items()} == {
        "hint tx_size=0",
        "hint tclass=0",
        "hint msg_order=0",
    }


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("verbs;ofi_rxm", {"traffic_class": DSCP_26}, "traffic_class = 282: provider verbs;ofi_rxm has no"),
        ("efa", {"traffic_class": DSCP_26}, "traffic_class = 282: provider efa .* low_latency"),
        ("tcp", {"traffic_class": LOW_LATENCY}, "traffic_class = 513: provider tcp .* bulk_data"),
        ("efa", {"gid_index": 0}, "gid_index = 0: provider efa has no such setting"),
        ("efa", {"interface": "lo"}, "interface = lo: provider efa .* domain"),
        ("efa", {"queue_depth": 2048}, "holds 1024 writes, queue_depth = 2048"),
    ],
)
def test_a_setting_that_the_provider_has_not_is_refused(
    name: str, settings: dict[str, Any], said: str, opened: Open
) -> None:
    with pytest.raises(StartupError, match=said):
        opened(Wrapped(name, most_writes=1024, emulated=0), **settings)


@pytest.mark.parametrize(
    ("wrapped", "said"),
    [
        (Wrapped("efa", lacks="FI_RMA"), "efa on lo: no RDMA write"),
        (Wrapped("efa", lacks="FI_REMOTE_WRITE"), "efa on lo: no RDMA write"),
        (Wrapped("opx", cq_data=0), "opx on lo: remote completion data of 0 bytes, 4 needed"),
        (Wrapped("efa", emulated=1), "provider efa, .*RDMA writes are emulated"),
        (Wrapped("efa"), "provider efa, .*whether RDMA writes are emulated .needs libfabric 1.18"),
    ],
)
def test_a_missing_capability_is_named(wrapped: Wrapped, said: str, opened: Open) -> None:
    with pytest.raises(StartupError, match=said):
        opened(wrapped)


@pytest.mark.parametrize("library", ["system", "wheel"])
def test_efa_provider_with_device_writes_is_accepted(library: str, opened: Open) -> None:
    needs(library)
    assert opened(Wrapped("efa", library, emulated=0))


@pytest.mark.parametrize(
    ("field", "value"),
    [("gid_index", -2), ("gid_index", 256), ("queue_depth", -1), ("queue_depth", (1 << 16) + 1)],
)
def test_a_setting_out_of_range_names_its_field(field: str, value: int) -> None:
    with pytest.raises(ConfigError) as caught:
        FabricOptions(**{field: value})  # type: ignore[arg-type]
    assert (caught.value.field, caught.value.value) == (field, value)


def test_a_queue_must_hold_an_operation_to_one_peer() -> None:
    needs("system")
    FabricOptions(queue_depth=SPEC.max_tokens + 3).check_depth(SPEC.max_tokens)
    with pytest.raises(ConfigError, match=r"queue_depth = 6: must be 0 .* or 7 to 65536: max_tokens is 4"):
        FabricLink(SPEC, FabricOptions(address="127.0.0.1", queue_depth=6))


def test_ranks_of_a_node_have_own_devices_and_share_the_rest() -> None:
    config = Config.from_values(
        {
            "fabric.domain": "mlx5_0, mlx5_1",
            "fabric.interface": "ib0",
            "fabric.traffic_class": "26",
            "fabric.gid_index": 3,
            "fabric.queue_depth": 1024,
            "fabric.adaptive_routing": False,
        }
    ).fabric
    both = [fabric_options(config, rank, 2) for rank in range(2)]
    assert [o.domain for o in both] == ["mlx5_0", "mlx5_1"]
    assert [o.interface for o in both] == ["ib0", "ib0"]
    assert {(o.traffic_class, o.gid_index, o.queue_depth, o.adaptive_routing) for o in both} == {
        (DSCP_26, 3, 1024, False)
    }
    assert fabric_options(Config.from_values({}).fabric, 0, 1) == FabricOptions()


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"fabric.domain": "mlx5_0,mlx5_1"}, "fabric.domain"),
        ({"fabric.domain": "mlx5_0,,mlx5_1"}, "fabric.domain"),
        ({"fabric.interface": "a,b"}, "fabric.interface"),
        ({"fabric.traffic_class": "64"}, "fabric.traffic_class"),
        ({"fabric.traffic_class": "fast"}, "fabric.traffic_class"),
    ],
)
def test_a_section_that_cannot_be_told_to_ranks_is_refused(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fabric_options(Config.from_values(values).fabric, 0, 3)
    assert caught.value.field == field


def test_settings_are_told_without_torch() -> None:
    line = "import sys, ep_server.ranks.group; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", line], check=False, timeout=60).returncode == 0
