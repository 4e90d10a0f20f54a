"""What a GPU has room for, and the numbers that are told where it has not. Nothing here needs one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ep_server.backends.gpu import assembly
from ep_server.backends.gpu.memory import KV_SHARE, Room, room_for_steps
from ep_server.cli.inspect import GPU_KV_FRACTION
from ep_server.errors import StartupError
from ep_server.ranks.devices import CudaDevice
from ep_server.ranks.exchanges import Opening
from ep_server.ranks.group import plan_group
from ep_server.v1 import rank_pb2 as pb
from tests.support.ranks.rank_group import rank_config

SHAPE = Path(__file__).parents[4] / "benchmarks" / "shapes" / "qwen3-30b-a3b"
GIB = 1 << 30
ROOM = Room("cuda:3", 40 * GIB, 139 * GIB)


def test_the_cache_gets_its_share_of_what_is_free() -> None:
    blocks = ROOM.kv_blocks(block=GIB, asked=0, useful=1000, weights=90 * GIB)
    assert blocks == int(40 * KV_SHARE) == 32


def test_plans_give_the_cache_the_same_share() -> None:
    assert GPU_KV_FRACTION == KV_SHARE


def test_no_more_than_is_of_use() -> None:
    assert ROOM.kv_blocks(block=GIB, asked=0, useful=7, weights=0) == 7


def test_as_many_as_asked_for_if_they_fit() -> None:
    """Beyond the share too: whoever asks knows what else is to come."""
    assert ROOM.kv_blocks(block=GIB, asked=40, useful=7, weights=0) == 40


@pytest.mark.parametrize(
    ("block", "asked", "words"),
    [
        (33 * GIB, 0, r"with 90\.00 GiB of weights 40\.00 GiB of 139\.00 GiB are free on cuda:3, a KV block"),
        (
            GIB,
            41,
            r"90\.00 GiB of weights 40\.00 GiB of .*, scheduler\.kv_blocks = 41 of 1073741824 bytes need "
            r"41\.00 GiB: must be at most 40, or 0",
        ),
    ],
)
def test_a_cache_that_does_not_fit_is_refused_with_the_numbers(block: int, asked: int, words: str) -> None:
    with pytest.raises(StartupError, match=f"the model does not fit: .*{words}"):
        ROOM.kv_blocks(block, asked, 1000, 90 * GIB)


def test_weights_that_do_not_fit_are_refused_before_reading() -> None:
    ROOM.check_weights(40 * GIB)
    with pytest.raises(StartupError, match=r"40\.01 GiB of weights, 40\.00 GiB of 139\.00 GiB are free on"):
        ROOM.check_weights(int(40.01 * GIB))


def test_the_exchange_counts_before_weights_are_read() -> None:
    ROOM.check_weights(30 * GIB, 10 * GIB)
    with pytest.raises(StartupError, match=r"30\.00 GiB of weights and 10\.01 GiB of exchange, 40\."):
        ROOM.check_weights(30 * GIB, int(10.01 * GIB))


def test_steps_with_many_rows_leave_less_for_the_cache() -> None:
    assert ROOM.kv_blocks(GIB, 0, 1000, 90 * GIB, step=10 * GIB) == int(30 * KV_SHARE)
    assert ROOM.kv_blocks(GIB, 30, 1000, 90 * GIB, step=10 * GIB) == 30
    words = r"of which a step with many rows takes 10\.00 GiB .*must be at most 30, or 0"
    with pytest.raises(StartupError, match=words):
        ROOM.kv_blocks(GIB, 31, 1000, 90 * GIB, step=10 * GIB)


def test_copies_of_fp8_blocks_leave_less_for_the_cache() -> None:
    assert ROOM.kv_blocks(GIB, 0, 1000, 90 * GIB, step=GIB, copies=9 * GIB) == int(30 * KV_SHARE)
    words = (
        r"a step with many rows takes 1\.00 GiB .*copies of blocks for prompts take 9\.00 GiB .*at most 30,"
    )
    with pytest.raises(StartupError, match=words):
        ROOM.kv_blocks(GIB, 31, 1000, 90 * GIB, step=GIB, copies=9 * GIB)


def test_steps_that_do_not_fit_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where blocks were asked for that leave nothing to capture graphs in."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB // 2, 139 * GIB))
    words = r"no room for steps: 0\.50 GiB of 139\.00 GiB are free on cuda:3, .*kv_blocks = 7: must be"
    with (
        pytest.raises(StartupError, match=words),
        room_for_steps(torch.device("cuda:3"), "scheduler.kv_blocks = 7"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_without_a_gpu_there_are_as_many_blocks_as_are_of_use() -> None:
    for asked, blocks in ((0, 9), (5, 5)):
        plan = assembly.GpuPlan(asked, 4, 1, 8, useful_blocks=9)
        assert assembly.kv_blocks_on(torch.device("cpu"), None, plan) == blocks  # type: ignore[arg-type]


def test_a_rank_asks_its_gpu_before_it_meets_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two ranks holds half of the experts and all else, in bfloat16."""
    pytest.importorskip("ep_server._cuda", reason="built without nvcc")
    fields = {"parallel__device": "cuda", "model__load_format": "dummy", "model__dtype": "bfloat16"}
    config = rank_config(SHAPE, 2, **fields)
    plan = plan_group(config)
    assert 28 * GIB < plan.weight_bytes[1] < 32 * GIB
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GIB, 24 * GIB))
    device = CudaDevice(pb.Start(rank=1, num_ranks=2), config)
    nobody = Opening(lambda _: pytest.fail("it met them"), lambda *_: pb.Connect())
    with pytest.raises(
        StartupError, match=r"0\.\d\d GiB of exchange, 20\.00 GiB of 24\.00 GiB are free on cuda:1"
    ):
        device.open(replace(plan.exchange, rank=1), nobody)


def test_more_ranks_than_gpus_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = rank_config(SHAPE, 2, parallel__device="cuda", model__load_format="dummy")
    with pytest.raises(StartupError, match=r"each of parallel\.ranks = 2; this host has 1$"):
        CudaDevice(pb.Start(rank=1, num_ranks=2), config)


@pytest.mark.parametrize(
    ("cuda", "words"),
    [(None, "is a build without CUDA"), ("13.0", "finds none; .* new enough for CUDA 13.0")],
)
def test_a_host_without_gpus_is_told_why(
    cuda: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    config = rank_config(SHAPE, 1, parallel__device="cuda", model__load_format="dummy")
    with pytest.raises(StartupError, match=rf"this host has 0: torch [\w.+]+ {words}"):
        CudaDevice(pb.Start(rank=0, num_ranks=1), config)
