"""What exchange.device_memory asks of the ranks of several nodes, and where it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ep_server.errors import ConfigError, StartupError
from ep_server.exchange.fabric import gpu_direct, link
from ep_server.ranks.exchanges import Opening, open_exchange
from ep_server.ranks.group import gpu_exchange, plan_group
from ep_server.v1 import rank_pb2 as pb
from tests.support.models.checkpoints import Tiny
from tests.support.ranks.rank_group import rank_config

GPUS = {"parallel__device": "cuda", "cluster__nodes": 2, "cluster__node_rank": 0, "model__dtype": "bfloat16"}


@pytest.mark.parametrize("fields", [{"cluster__nodes": 1}, {"parallel__device": "cpu"}])
def test_cards_are_not_asked_to_reach_what_is_not_there(tiny: Tiny, fields: dict[str, object]) -> None:
    settings = {**GPUS, "exchange__device_memory": "hmem", **fields}
    with pytest.raises(ConfigError, match=r"exchange\.device_memory = 'hmem'.*several nodes with GPUs"):
        plan_group(rank_config(tiny.path, 2, **settings))


@pytest.mark.parametrize(
    ("device", "asked", "seen"),
    [
        ("cuda:1", "auto", ["auto"]),
        ("cuda:1", "hmem", ["hmem"]),
        ("cuda:1", "host", ["host"]),
        ("cpu", "auto", []),
    ],
)
def test_a_rank_opens_its_end_as_the_setting_says(
    tiny: Tiny, device: str, asked: str, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = rank_config(tiny.path, 2, **{**GPUS, "exchange__device_memory": asked})
    chosen: list[str] = []

    def rows_on_device(device_memory: str, spec: Any, on: torch.device, options: Any) -> None:
        assert on == torch.device(device)
        chosen.append(device_memory)

    def opened(*_: object) -> Any:
        raise StartupError("enough")

    monkeypatch.setattr(gpu_direct, "rows_on_device", rows_on_device)
    monkeypatch.setattr(link, "FabricLink", opened)
    spec = plan_group(config).exchange
    start = pb.Start(rank=0, threads=1, exchange_fd=-1)
    with pytest.raises(StartupError, match="enough"):
        open_exchange(start, config, spec, Opening(print, print), torch.device(device))
    assert chosen == seen


@pytest.mark.parametrize(("mode", "heap"), [("auto", True), ("low_latency", False)])
def test_memory_of_many_rows_is_known_between_hosts(tiny: Tiny, mode: str, heap: bool) -> None:
    """Of the ranks of one host: the others' rows come through host memory."""
    settings = {**GPUS, "exchange__between_nodes": "hierarchical", "exchange__mode": mode}
    config = rank_config(tiny.path, 2, **settings)
    found = gpu_exchange(config, plan_group(config).exchange)
    assert found is not None
    assert (found.heap > 0, found.step > 0) == (heap, heap)
