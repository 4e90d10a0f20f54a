"""The size calculator against the server it foretells, and its step bounds against routing that is drawn."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from ep_server import _C
from ep_server.cli.app import assemble
from ep_server.cli.demo.run import DEMO_MODEL
from ep_server.cli.main import main
from ep_server.config import Config
from ep_server.errors import StartupError
from ep_server.exchange.segment import available_memory
from ep_server.exchange.spec import geometry_of
from ep_server.models.families import read_spec
from ep_server.ranks.sizing import Machine, Workload, fewest_ranks, size
from ep_server.scheduler import place_experts
from tests.support.raw_client import RawClient

GIB = 1 << 30
SHAPES = Path(__file__).parents[3] / "benchmarks" / "shapes"
DECODE = Workload(tokens=6, context=100)


def machine(memory: int = GIB) -> Machine:
    return Machine(memory, bandwidth=10e9, link=1e9, flops=1e12, packed=True)


def config(ranks: int, **values: object) -> Config:
    dotted = {name.replace("__", "."): value for name, value in values.items()}
    flags = {"model.path": str(DEMO_MODEL), "parallel.ranks": ranks, **dotted}
    return Config.load(flags=flags, environ={})


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
async def test_it_foretells_what_a_server_reports(dtype: str) -> None:
    ports = {"grpc__port": 0, "metrics__port": 0}
    served = config(3, model__dtype=dtype, scheduler__kv_fraction=0.01, **ports)
    plan = size(served, read_spec(DEMO_MODEL), machine(available_memory() // 3), DECODE)
    async with assemble(served) as app:
        await app.server.start(lambda *_: None)
        async with RawClient(app.server.address) as client:
            info = await client.server_info()
        await app.server.stop()
    for rank in info.rank_info:
        assert rank.weight_bytes == plan.plan.weight_bytes[rank.rank]
        assert rank.kv_bytes == rank.kv_blocks * info.kv_block_size * plan.kv_bytes_per_token
    first = info.rank_info[0]
    weights = [n for part, n in plan.parts.items() if part not in ("KV cache", "exchange", "process")]
    assert first.weight_bytes == sum(weights)
    assert first.exchange_bytes <= plan.parts["exchange"] <= first.exchange_bytes + 4096
    # Blocks follow the memory free at that moment, of which others take some between the two.
    assert first.kv_blocks == pytest.approx(plan.plan.kv_blocks, rel=0.2)
    assert plan.parts["KV cache"] == plan.kv_tokens * plan.kv_bytes_per_token


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_fits_into_its_own_memory(ranks: int) -> None:
    asked = config(ranks, scheduler__kv_fraction=0.95)
    tight = size(asked, read_spec(DEMO_MODEL), machine(210 << 20), DECODE)
    assert 0.9 * (210 << 20) < tight.used <= 210 << 20  # rank 0 holds the most experts


@pytest.mark.parametrize("tokens", [256, 8192])
def test_the_heap_for_many_rows_takes_room_on_gpus(tokens: int) -> None:
    """Of 8 ranks, 2,048 channels: what comes in is a row, 8 ids and weights, what returns is a row."""
    shape = Path(__file__).parents[3] / "benchmarks" / "shapes" / "qwen3-30b-a3b"
    gpu = Machine(79 << 30, bandwidth=3e12, link=4e11)
    given = {"model__path": str(shape), "model__load_format": "dummy", "scheduler__max_step_tokens": tokens}
    plans = [
        size(config(8, exchange__mode=mode, **given), read_spec(shape), gpu, DECODE)
        for mode in ("auto", "low_latency")
    ]
    heap = plans[0].parts["exchange of many rows"]
    least = 8 * tokens * (2 * 2048 + 8 * 12) + 7 * tokens * 2 * 2048
    assert least <= heap <= least + (8 << 20)
    assert "exchange of many rows" not in plans[1].parts
    assert plans[0].parts["exchange"] == plans[1].parts["exchange"]
    cache = plans[1].parts["KV cache"] - plans[0].parts["KV cache"]
    block = plans[0].kv_bytes_per_token * 16
    share = config(8).scheduler.kv_fraction
    assert cache == pytest.approx(share * heap, abs=2 * block) or cache == 0  # 0: more than is of use


def test_the_fewest_ranks() -> None:
    spec = read_spec(DEMO_MODEL)
    small = {
        "scheduler__max_step_tokens": 8,
        "exchange__num_banks": 2,
        "resilience__spare_slots": "0",
    }
    sizes = [size(config(r, **small), spec, machine(), DECODE) for r in (1, 2, 3)]
    fixed = [s.used - s.parts["KV cache"] + s.kv_bytes_per_token * 16 for s in sizes]
    assert fixed[0] > fixed[1] > fixed[2]  # experts are shared out, and the exchange is small
    for ranks in (1, 2, 3):
        room, anything = (
            machine(fixed[ranks - 1] + (32 << 10)),
            config(7, scheduler__kv_fraction=0.95, **small),
        )
        assert fewest_ranks(anything, spec, room, DECODE).ranks == ranks
    with pytest.raises(StartupError, match="does not fit"):
        fewest_ranks(config(1), spec, machine(1 << 20), DECODE)


def test_bytes_of_a_step_are_those_of_drawn_routing() -> None:
    """Oracle: routing drawn token by token; distinct experts and distinct ranks counted."""
    spec, ranks, draw, rounds = read_spec(DEMO_MODEL), 3, random.Random(0), 4000
    found = size(config(ranks), spec, machine(), DECODE)
    experts = spec.router.num_experts
    owner = place_experts(experts, ranks)
    reached = rows = 0
    for _ in range(rounds):
        tokens = [
            [draw.sample(range(experts), spec.router.top_k) for _ in range(DECODE.tokens)]
            for _ in range(ranks)
        ]
        reached += len({e for own in tokens for ids in own for e in ids if owner[e] == 0})
        rows += sum(len({owner[e] for e in ids} - {0}) for ids in tokens[0])
    by_name = {bound.name.partition(" (")[0]: bound for bound in found.bounds}
    expert = 3 * spec.hidden * spec.expert_ffn * 2  # whole panels: nothing is padded
    assert by_name["experts"].amount == pytest.approx(3 * reached / rounds * expert, rel=0.02)
    assert by_name["experts"].seconds == by_name["experts"].amount / 10e9
    layout = _C.Layout(geometry_of(found.plan.exchange))
    sent = 3 * rows / rounds * (layout.row_bytes + layout.combine_bytes)
    assert by_name["dispatch and combine"].amount == pytest.approx(sent, rel=0.02)
    assert by_name["KV cache"].amount == 6 * 100 * 768  # 3 layers x (K, V) x 2 heads x 32 channels x 2 bytes
    assert found.step_seconds == pytest.approx(sum(b.seconds for b in found.bounds[:-1]))


PADDING = 0.01  # of the weights below: the router is packed now, and half of its panels is padding


@pytest.mark.parametrize(
    ("ranks", "tokens", "bound_ms", "measured_ms"),
    [
        (1, 1, 1.41, 3.45),
        (1, 8, 4.81, 8.49),
        (2, 4, 4.81, 7.79),
        (1, 32, 6.91, 14.65),
        (2, 16, 6.91, 13.61),
    ],
)
def test_bound_and_expectation_of_what_was_measured(
    tmp_path: Path, ranks: int, tokens: int, bound_ms: float, measured_ms: float
) -> None:
    """docs/benchmarks.md, decode on CPU: the bound of that benchmark's formula, the median of its steps."""
    shape = {
        "model_type": "qwen3_moe", "hidden_size": 512, "num_hidden_layers": 8, "num_experts": 32,
        "num_experts_per_tok": 4, "moe_intermediate_size": 256, "intermediate_size": 1024,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192,
        "max_position_embeddings": 4096, "norm_topk_prob": True, "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    rate = 31e9 / ranks  # measured there; the ranks share it
    found = size(
        config(ranks), read_spec(tmp_path), Machine(GIB, rate, rate, packed=True), Workload(tokens, 80)
    )
    weights = sum(bound.seconds for bound in found.bounds[:2])
    if ranks == 1:
        assert weights * 1e3 == pytest.approx(bound_ms, rel=PADDING + 0.03)
    low, high = found.expected_seconds or (0.0, 0.0)
    assert low * 1e3 <= measured_ms * (1 + PADDING) and measured_ms <= high * 1e3


def test_the_plan_of_several_nodes(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--ranks are all of them; each decodes as many sequences as --tokens says."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("EP_SERVER_CLUSTER__NODES", "2")
    shape = str(SHAPES / "qwen3-30b-a3b")
    assert main(["inspect", "--plan", shape, "--device", "h200", "--ranks", "8", "--tokens", "128"]) == 0
    out = capfd.readouterr().out
    assert "experts (16 of 128 per layer)" in out and "(-" not in out
    assert "per rank: 1,024 sequences of 1,024" in out  # twice 128 of the model's 4,096
    assert main(["inspect", "--plan", shape, "--device", "h200", "--tokens", "257"]) == 1
    assert "--tokens = 257: must be 1 to 256" in capfd.readouterr().err


def test_the_command(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    alone = tmp_path / "config.json"
    alone.write_text((DEMO_MODEL / "config.json").read_text())
    assert main(["inspect", "--plan", str(alone), "--device", "h100", "--memory-gib", "0.25"]) == 0
    out = capfd.readouterr().out
    for words in (
        "qwen3_moe on 1 rank: memory",
        "experts (16 of 16 per layer)",
        "KV cache",
        "step, at least",
    ):
        assert words in out
    assert main(["inspect", "--plan", str(tmp_path), "--ranks", "2", "--bandwidth", "20", "--link", "9"]) == 0
    out = capfd.readouterr().out
    assert "on 2 ranks" in out and "tokens/s expected on all ranks" in out
    for flags, words in (
        (("--device", "h300"), "--device = 'h300': must be one of cpu, h100, h200"),
        (("--tokens", "257"), "--tokens = 257: must be 1 to 256, scheduler.max_step_tokens"),
        (("--device", "h100", "--tokens", "8193"), "--tokens = 8193: must be 1 to 8192, scheduler"),
        (("--context", "2049"), "--context = 2049: must be 1 to 2048"),
        (("--device", "h100", "--memory-gib", "0.1"), "the model does not fit"),
    ):
        assert main(["inspect", "--plan", str(tmp_path), *flags]) == 1
        err = capfd.readouterr().err
        assert words in err and err.count("\n") == 1
    for flag, value, told in (
        ("--device", "h200", "'h200'"),
        ("--memory-gib", "9", "9.0"),
        ("--tokens", "32", "32"),
    ):
        assert main(["inspect", str(DEMO_MODEL), flag, value]) == 1
        assert (
            capfd.readouterr().err == f"ep-server: error: {flag} = {told}: must be given only with --plan\n"
        )


def test_fp8_weights_and_caches_of_a_gpu(tmp_path: Path) -> None:
    """Codes and scales of experts, codes of keys and values; what a token multiplies stays the same."""
    shape = json.loads((SHAPES / "qwen3-30b-a3b-fp8" / "config.json").read_text())
    codes, values = tmp_path / "fp8", tmp_path / "bf16"
    for path, described in ((codes, shape), (values, shape | {"quantization_config": None})):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(described))
    gpu = Machine(141 * GIB, 4.8e12, 375e9, 989e12)
    fields = {"model__kv_dtype": "fp8_e4m3", "scheduler__kv_blocks": 1024}
    small, large = (
        size(config(4, model__path=str(path), **more), read_spec(path), gpu, DECODE)
        for path, more in ((codes, fields), (values, {"scheduler__kv_blocks": 1024}))
    )
    one, part = 3 * 768 * 2048, "experts (32 of 128 per layer)"
    assert large.parts[part] == 48 * 32 * one * 2
    assert small.parts[part] == 48 * 32 * (one + 3 * 6 * 16 * 4)
    assert small.parts["KV cache"] * 2 == large.parts["KV cache"] > 0
    assert small.kv_bytes_per_token * 2 == large.kv_bytes_per_token == 48 * 2 * 4 * 128 * 2
    assert small.bounds[-1].amount == large.bounds[-1].amount
