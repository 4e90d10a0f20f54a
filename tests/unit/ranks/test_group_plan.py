"""What a group plans for itself, against numbers worked out by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ep_server.errors import ConfigError, StartupError
from ep_server.exchange.api import Payload, Reduction
from ep_server.exchange.spec import group_bytes
from ep_server.models.inspect import inspect_checkpoint
from ep_server.ranks.group import (
    PROCESS_BYTES,
    SPIN_US,
    GroupPlan,
    hosts_of,
    local_ranks,
    plan_group,
    spin_budget,
    topology_of,
    usable_cores,
)
from tests.support.models.checkpoints import Tiny
from tests.support.models.fp8 import Fp8Tiny
from tests.support.ranks.rank_group import rank_config

# 2 layers x (K, V) x 2 heads x 16 channels x 4 tokens x 4 bytes
BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 4


def test_the_exchange_follows_model_and_configuration(tiny: Tiny) -> None:
    config = rank_config(
        tiny.path,
        4,
        exchange__num_banks=2,
        exchange__reduction="source",
        exchange__timeout_seconds=2.5,
        parallel__threads_per_rank=3,
    )
    plan = plan_group(config)
    spec = plan.exchange
    assert (spec.rank, spec.num_ranks, spec.max_tokens) == (0, 4, 32)
    assert (spec.hidden, spec.top_k, spec.placement) == (64, 3, (0, 0, 1, 1, 2, 3))
    assert (spec.payload, spec.reduction, spec.num_banks) == (Payload.FP32, Reduction.SOURCE, 2)
    assert spec.timeout_ns == 2_500_000_000
    assert (plan.kv_blocks, plan.threads) == (128, 3)
    assert plan.weight_bytes[0] == plan.weight_bytes[1] > plan.weight_bytes[2] == plan.weight_bytes[3]


@pytest.mark.parametrize(
    ("dtype", "payload", "expected"),
    [
        ("bfloat16", "auto", Payload.BF16),
        ("float32", "auto", Payload.FP32),
        ("float32", "bf16", Payload.BF16),
    ],
)
def test_the_payload_follows_the_dtype(tiny: Tiny, dtype: str, payload: str, expected: Payload) -> None:
    config = rank_config(tiny.path, 2, model__dtype=dtype, exchange__payload=payload)
    assert plan_group(config).exchange.payload is expected


def test_ranks_on_gpus_keep_fp8_experts_as_they_are(fp8_tiny: Fp8Tiny) -> None:
    """160 x 256 codes three times, and their scales; on the CPU the same weights are values."""
    on_cpu, on_gpu = (
        plan_group(rank_config(fp8_tiny.path, 4, model__dtype="bfloat16", parallel__device=device))
        for device in ("cpu", "cuda")
    )
    replicated = on_gpu.weight_bytes[0] - 2 * (3 * 160 * 256 + 12 * 4)
    assert on_gpu.weight_bytes == (on_gpu.weight_bytes[0],) * 4
    experts = inspect_checkpoint(fp8_tiny.path).parameters
    assert replicated >= 2 * (sum(experts.values()) - experts["experts"])
    assert on_cpu.weight_bytes[0] >= replicated + 2 * 2 * 3 * 160 * 256


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model__kv_dtype": "fp8_e4m3"},
            "model.kv_dtype = 'fp8_e4m3': must be auto where parallel.device = cpu",
        ),
        (
            {"model__attention": "flashinfer"},
            "model.attention = 'flashinfer': must be auto where parallel.device = cpu",
        ),
        (
            {"parallel__device": "cuda", "exchange__payload": "fp8_ue8m0"},
            "exchange.payload = 'fp8_ue8m0': must be one of auto, fp32, fp8, fp8_pow2 where "
            "parallel.device = cuda and the model is served as float32",
        ),
        (
            {"parallel__device": "cuda", "exchange__payload": "fp32", "model__dtype": "bfloat16"},
            "exchange.payload = 'fp32': must be one of auto, bf16, fp8, fp8_pow2 where "
            "parallel.device = cuda and the model is served as bfloat16",
        ),
    ],
)
def test_what_a_device_cannot_compute_is_refused_by_name(
    tiny: Tiny, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"\A{re.escape(message)}\Z"):
        plan_group(rank_config(tiny.path, 2, **fields))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_kv_blocks_are_a_share_of_what_is_left(tiny: Tiny, ranks: int) -> None:
    config = rank_config(
        tiny.path,
        ranks,
        scheduler__kv_blocks=0,
        scheduler__kv_fraction=0.5,
        resilience__spare_slots="0",
    )
    plan = plan_group(config, available=1 << 34)
    fixed = sum(plan.weight_bytes) + group_bytes(plan.exchange) + ranks * PROCESS_BYTES
    for blocks in (1, 2, 1000):
        room = 2 * blocks * ranks * BLOCK_BYTES
        assert plan_group(config, available=fixed + room).kv_blocks == blocks
        assert plan_group(config, available=fixed + room + 2 * ranks * BLOCK_BYTES - 1).kv_blocks == blocks
    with pytest.raises(StartupError, match="does not fit"):
        plan_group(config, available=fixed + 1)
    with pytest.raises(StartupError, match="does not fit"):
        plan_group(config, available=0)


def test_what_kv_caches_leave_holds_those_of_lost_ranks(tiny: Tiny) -> None:
    """Their names count too: 16 bytes for each block, in whole pages."""
    config = rank_config(tiny.path, 3, scheduler__kv_blocks=512, resilience__spare_slots="0")
    plan = plan_group(config, available=1 << 34)
    fixed = sum(plan.weight_bytes) + group_bytes(plan.exchange) + 3 * PROCESS_BYTES
    cache = 512 * (BLOCK_BYTES + 16)
    assert plan.kv is not None and plan.kv.nbytes == cache
    assert plan.kv_keeps == 3
    for caches, keeps in ((3, 0), (4, 1), (5, 2), (6, 3), (7, 3)):
        assert plan_group(config, available=fixed + caches * cache).kv_keeps == keeps
        assert plan_group(config, available=fixed + (caches + 1) * cache - 1).kv_keeps == keeps


@pytest.mark.parametrize(
    ("gib", "dtype", "spares"), [(64, "bfloat16", 3), (64, "float32", 0), (1, "bfloat16", 0)]
)
def test_two_gpu_ranks_hold_all_experts_if_they_fit(tiny: Tiny, gib: int, dtype: str, spares: int) -> None:
    """Half of them as copies that do not serve. Ranks whose rows travel in float32 cannot be replaced."""
    config = rank_config(tiny.path, 2, parallel__device="cuda", model__dtype=dtype)
    available = gib << 30 if gib > 1 else sum(plan_group(config, 1 << 36).weight_bytes) + 2 * PROCESS_BYTES
    plan = plan_group(config, available)
    assert plan.spares.spares == spares
    if not spares:
        assert plan.placement is None and plan.exchange.placement == (0, 0, 0, 1, 1, 1)
        return
    assert plan.exchange.placement == (0,) * 6 + (1,) * 6
    assert plan.placement is not None
    for held, serves in zip(plan.placement.experts, plan.placement.serves, strict=True):
        assert held == (0, 1, 2, 3, 4, 5, 3, 4, 5, 0, 1, 2)
        assert [bool(part) for part in serves] == [True] * 3 + [False] * 3 + [True] * 3 + [False] * 3


@pytest.mark.parametrize("node", [0, 1, 2])
def test_a_node_of_several_plans_for_its_own_ranks(tiny: Tiny, node: int) -> None:
    """Six experts on six ranks of three hosts: each holds two of them, and outboxes beside its regions."""
    config = rank_config(tiny.path, 2, cluster__nodes=3, cluster__node_rank=node, scheduler__kv_blocks=100)
    plan = plan_group(config, available=1 << 34)
    assert (plan.exchange.num_ranks, plan.exchange.placement) == (6, (0, 1, 2, 3, 4, 5))
    assert len(plan.weight_bytes) == 6
    assert local_ranks(config) == range(2 * node, 2 * node + 2)
    assert hosts_of(config) == (0, 0, 1, 1, 2, 2)
    fixed = sum(plan.weight_bytes[2 * node : 2 * node + 2]) + 2 * group_bytes(plan.exchange) // 3
    needed = fixed + 2 * PROCESS_BYTES + 200 * BLOCK_BYTES
    assert plan_group(config, available=needed).kv_blocks == 100
    with pytest.raises(
        StartupError, match=r"does not fit: .*; scheduler\.kv_blocks = 100: must be at most 99"
    ):
        plan_group(config, available=needed - 1)
    with pytest.raises(StartupError, match=r"does not fit: .* of memory available\Z"):
        plan_group(config, available=fixed)  # with no number of blocks


@pytest.mark.parametrize(
    ("asked", "ranks", "fields", "hierarchical"),
    [
        ("auto", 2, {}, True),
        ("auto", 2, {"scheduler__max_running": 64}, True),
        ("auto", 2, {"scheduler__max_running": 63}, False),  # steps too small for two parts
        ("auto", 1, {}, False),  # no other GPU on the node
        ("auto", 2, {"exchange__reduction": "source"}, False),
        ("auto", 2, {"model__dtype": "float32"}, False),
        ("auto", 2, {"cluster__nodes": 1}, False),
        ("auto", 2, {"parallel__device": "cpu"}, False),
        ("flat", 2, {}, False),
        ("hierarchical", 1, {}, True),
        ("hierarchical", 2, {"scheduler__max_running": 1}, True),
        ("hierarchical", 2, {"exchange__reduction": "source"}, True),
    ],
)
def test_where_rows_of_gpus_on_several_nodes_travel(
    tiny: Tiny, asked: str, ranks: int, fields: dict[str, object], hierarchical: bool
) -> None:
    settings = {"parallel__device": "cuda", "cluster__nodes": 3, "cluster__node_rank": 1}
    settings |= {"model__dtype": "bfloat16", "exchange__between_nodes": asked, **fields}
    config = rank_config(tiny.path, ranks, **settings)
    assert topology_of(config, plan_group(config).exchange).hierarchical is hierarchical


@pytest.mark.parametrize(
    "fields", [{"model__dtype": "float32"}, {"cluster__nodes": 1}, {"parallel__device": "cpu"}]
)
def test_nvlink_inside_nodes_is_refused_where_it_cannot_be(tiny: Tiny, fields: dict[str, object]) -> None:
    settings = {"parallel__device": "cuda", "cluster__nodes": 2, "cluster__node_rank": 0}
    settings |= {"model__dtype": "bfloat16", "exchange__between_nodes": "hierarchical", **fields}
    with pytest.raises(ConfigError, match=r"exchange\.between_nodes = 'hierarchical'"):
        plan_group(rank_config(tiny.path, 2, **settings))


def test_no_more_blocks_than_can_be_of_use(tiny: Tiny) -> None:
    """Twice 64 sequences of 160 tokens, in blocks of 4."""
    config = rank_config(tiny.path, 1, scheduler__kv_blocks=0)
    assert plan_group(config, available=1 << 40).kv_blocks == 2 * 64 * 40


def test_given_blocks_fit_or_are_refused(tiny: Tiny) -> None:
    config = rank_config(tiny.path, 2, scheduler__kv_blocks=1000)
    plan = plan_group(config, available=1 << 34)
    needed = sum(plan.weight_bytes) + group_bytes(plan.exchange) + 2 * PROCESS_BYTES + 2000 * BLOCK_BYTES
    assert plan_group(config, available=needed).kv_blocks == 1000
    with pytest.raises(StartupError, match=r"does not fit: 0\.00 GiB of weights"):
        plan_group(config, available=needed - 1)


def test_a_host_shadow_fits_or_is_refused(tiny: Tiny) -> None:
    """A copy of all experts, as ranks hold them; a container's limit is in what is available."""
    config = rank_config(tiny.path, 2, resilience__spare_slots="0", scheduler__kv_blocks=100)
    without = plan_group(config, available=1 << 34)
    experts = sum(without.weight_bytes) - 2 * min(plan_group(rank_config(tiny.path, 12)).weight_bytes)
    with_shadow = replace(config, resilience=replace(config.resilience, shadow="on"))
    plan = plan_group(with_shadow, available=1 << 34)
    assert without.shadow is None and plan.shadow is not None
    assert plan.shadow.count * plan.shadow.expert_bytes == experts
    assert experts < plan.shadow.nbytes < experts + (plan.shadow.count + 1) * 4096
    needed = sum(plan.weight_bytes) + group_bytes(plan.exchange) + 2 * PROCESS_BYTES + 200 * BLOCK_BYTES
    assert plan_group(with_shadow, needed + plan.shadow.nbytes).shadow == plan.shadow
    with pytest.raises(StartupError, match=r"0\.00 GiB of host shadow \(resilience\.shadow\)"):
        plan_group(with_shadow, needed + plan.shadow.nbytes - 1)


def test_gpu_ranks_have_a_host_shadow_if_it_fits(tiny: Tiny) -> None:
    def planned(shadow: str, available: int) -> GroupPlan:
        fields = {"parallel__device": "cuda", "model__dtype": "bfloat16", "resilience__shadow": shadow}
        return plan_group(rank_config(tiny.path, 2, **fields), available)

    layout = planned("on", 1 << 34).shadow
    assert layout is not None and planned("off", 1 << 34).shadow is None
    assert planned("on", layout.nbytes).shadow == planned("auto", 2 * layout.nbytes).shadow == layout
    assert planned("auto", 2 * layout.nbytes - 1).shadow is None
    with pytest.raises(StartupError, match=r"resilience\.shadow = on: .* must fit into the .* auto or off"):
        planned("on", layout.nbytes - 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"resilience__on_rank_loss": "stop"},
        {"cluster__nodes": 2, "cluster__node_rank": 0},
        {"parallel__device": "cuda", "model__dtype": "float32"},
    ],
)
def test_no_host_shadow_where_all_ranks_end(tiny: Tiny, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"resilience\.shadow = 'on': must be off or auto, unless"):
        plan_group(rank_config(tiny.path, 2, resilience__shadow="on", **fields), 1 << 34)
    assert plan_group(rank_config(tiny.path, 2, resilience__shadow="auto", **fields), 1 << 34).shadow is None


def test_a_host_tier_that_does_not_fit_is_named(tiny: Tiny) -> None:
    config = rank_config(tiny.path, 2, scheduler__kv_host_gib=9)
    with pytest.raises(StartupError, match=r"scheduler\.kv_host_gib = 9: must be less than 7\.[0-9]"):
        plan_group(config, available=1 << 34)


@pytest.mark.parametrize(
    ("ranks", "fields", "processes"),
    [
        (2, {}, 5),
        (1, {}, 1),
        (2, {"resilience.on_rank_loss": "stop"}, 2),
        (2, {"cluster.nodes": 2, "cluster.node_rank": 0}, 4),
    ],
)
def test_processes_on_standby_need_memory(
    tiny: Tiny, ranks: int, fields: dict[str, Any], processes: int
) -> None:
    fields = {name.replace(".", "__"): value for name, value in fields.items()}
    config = rank_config(tiny.path, ranks, scheduler__kv_blocks=10, resilience__standby=3, **fields)
    with pytest.raises(StartupError, match=f"GiB for {processes} process(es)? need more"):
        plan_group(config, available=0)


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_cores_are_limited_by_the_control_group(
    tmp_path: Path, files: dict[str, str], limit: int | None
) -> None:
    (tmp_path / "cpu").mkdir()
    everything = usable_cores(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == min(everything, limit or everything)


@pytest.mark.parametrize(
    ("configured", "busy", "cores", "expected"),
    [(-1, 4, 4, SPIN_US), (-1, 5, 4, 0), (-1, 1, 64, SPIN_US), (0, 1, 64, 0), (7, 64, 1, 7)],
)
def test_only_threads_with_cores_of_their_own_spin(
    configured: int, busy: int, cores: int, expected: int
) -> None:
    assert spin_budget(configured, busy, cores) == expected
