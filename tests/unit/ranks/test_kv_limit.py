"""A KV cache that the system does not give to a rank ends the start with what to change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ep_server.errors import StartupError
from ep_server.models.families import read_spec
from ep_server.models.sizes import Dtype
from ep_server.ranks.devices import CpuDevice
from ep_server.v1 import rank_pb2 as pb
from tests.support.models.checkpoints import Tiny
from tests.support.ranks.rank_group import rank_config

NOT_OPEN = 1 << 20


def refuse(*_: object) -> None:
    raise OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize(
    ("start", "why"),
    [({"kv_fd": NOT_OPEN, "kv_place": 0}, "Bad file descriptor"), ({}, "Cannot allocate memory")],
    ids=["outlives-the-rank", "its-own"],
)
def test_no_memory_for_a_kv_cache(tiny: Tiny, start: dict[str, int], why: str) -> None:
    device = CpuDevice(pb.Start(kv_blocks=1 << 20, threads=1, **start), rank_config(tiny.path, 1))
    model: Any = SimpleNamespace(spec=read_spec(str(tiny.path)), kv_dtype=Dtype.FLOAT32, runner=refuse)
    unused: Any = None
    with pytest.raises(StartupError, match=rf"2\.02 GiB of KV cache .*{why}\): lower scheduler\.kv_blocks"):
        device.build(model, unused, unused)
