"""Steps from reports of ranks, by hand; the expected number of distinct experts against a simulation."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

import ep_server
from ep_server.cli.bench.breakdown import PHASES, Rates, Steps, bounds, less, steps_between
from ep_server.models.families import read_spec
from ep_server.models.families.spec import GqaSpec
from ep_server.models.footprint import footprint
from ep_server.models.sizes import Dtype
from ep_server.ranks.sizing import distinct_experts
from ep_server.records import RankStatistics

DEMO = Path(ep_server.__file__).parent / "assets" / "demo_model"


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(128, 8, 32), (16, 4, 3), (8, 2, 1), (64, 6, 40)])
def test_distinct_experts_of_uniform_draws(experts: int, top_k: int, tokens: int) -> None:
    source, trials = random.Random(5), 3000
    counts = [
        len({expert for _ in range(tokens) for expert in source.sample(range(experts), top_k)})
        for _ in range(trials)
    ]
    mean = sum(counts) / trials
    error = (sum((count - mean) ** 2 for count in counts) / trials**2) ** 0.5
    assert abs(mean - distinct_experts(experts, top_k, tokens)) <= 4 * error + 1e-9


OTHERS = {"vote": 5, "plan": 3, "publish": 4, "total": 40}


def report(rank: int, steps: int, scale: int) -> RankStatistics:
    """After so many steps; phases of 1, 2, 3 ... ns per step times `scale`, 40 in all: of these 5 in the
    vote, 3 and 4 to plan and publish."""
    sums = {f"step/{name}": steps * scale * (i + 1) for i, name in enumerate(PHASES)}
    return RankStatistics(
        rank,
        sums={**sums, **{f"step/{name}": n * scale * steps for name, n in OTHERS.items()}},
        counters={
            "run_steps": steps,
            "tokens": 3 * steps,
            "experts_active": steps * 2 * (4 + rank),
            "bytes/dispatch": 100 * steps,
            "bytes/combine": 0,
        },
        expert_tokens={rank: 10 * steps * (rank + 1), rank + 2: 5 * steps},
    )


def test_steps_between_two_reports() -> None:
    before = {rank: report(rank, 10, 1_000) for rank in (0, 1)}
    after = {rank: report(rank, 30, 1_000) for rank in (0, 1)}
    steps = steps_between(before, after, sparse_layers=2)
    assert steps is not None and steps.count == 20
    assert steps.seconds == pytest.approx(40e-6)
    assert [steps.phases[name] for name in PHASES] == pytest.approx([n * 1e-6 for n in range(1, 7)])
    assert steps.phases["wait"] == pytest.approx(5e-6)
    assert steps.phases["host"] == pytest.approx(7e-6)
    assert steps.phases["rest"] == pytest.approx((40 - 21 - 5 - 7) * 1e-6)
    assert sum(steps.phases.values()) == pytest.approx(steps.seconds)
    assert steps.host_share == pytest.approx(7 / 40)
    assert steps.tokens == 6 and steps.active == (4, 5) and steps.distinct == 9
    assert steps.load == (300, 500) and steps.imbalance == pytest.approx(500 / 400)
    assert steps.sent == {"dispatch": 100, "combine": 0}
    assert steps_between(after, after, 2) is None
    whole = steps_between({}, after, 2)
    assert whole is not None and whole.count == 30 and whole.seconds == pytest.approx(40e-6)


def test_a_shorter_run_is_taken_from_a_longer_one() -> None:
    """Prefill of 4 slow steps in both; decoding of 6 and 26 steps."""

    def run(decoding: int) -> Steps:
        slow, fast = report(0, 4, 9_000), report(0, decoding, 1_000)
        both = {name: slow.sums[name] + fast.sums[name] for name in slow.sums}
        counters = {name: slow.counters[name] + fast.counters[name] for name in slow.counters}
        rows = {expert: n + fast.expert_tokens[expert] for expert, n in slow.expert_tokens.items()}
        found = steps_between({}, {0: RankStatistics(0, sums=both, counters=counters, expert_tokens=rows)}, 2)
        assert found is not None
        return found

    alone = steps_between({}, {0: report(0, 20, 1_000)}, 2)
    decode = less(run(26), run(6))
    assert alone is not None and decode is not None
    assert decode.count == 20 and decode.load == alone.load
    assert decode.seconds == pytest.approx(alone.seconds)
    assert decode.phases == pytest.approx(alone.phases)
    assert decode.active == pytest.approx(alone.active) and decode.sent == pytest.approx(alone.sent)
    assert less(run(6), run(6)) is None


def on_device(prefill: int, decoding: int) -> RankStatistics:
    """Prefill steps of 100 ns, the device busy for 60 of them; decoding of 40 and 30, each second one timed:
    phases of 1, 2 ... 6 ns. Each third one is two micro-batches. The host works meanwhile."""
    timed = decoding // 2
    sums = {f"step/{name}": timed * (i + 1) for i, name in enumerate(PHASES)}
    counters = {"run_steps": prefill + decoding, "device_steps": prefill + decoding, "timed_steps": timed}
    return RankStatistics(
        0,
        sums={
            **sums,
            "step/total": 100 * prefill + 40 * decoding,
            "step/device": 60 * prefill + 30 * decoding,
            **{f"step/{name}": 35 * (prefill + decoding) for name in ("vote", "plan", "publish")},
        },
        counters={**counters, "tokens": 3 * decoding, "overlap_steps": decoding // 3},
    )


@pytest.mark.parametrize(
    ("long", "short", "wanted"), [((10, 1), (6, 4), 0), ((10, 6), (6, 0), 1), ((10, 4), (6, 2), 0.5)]
)
def test_a_share_of_overlapped_steps_is_one(
    long: tuple[int, int], short: tuple[int, int], wanted: float
) -> None:
    """Runs of (steps, of these overlapped): a short one may have more of the latter than a long one."""

    def run(count: int, overlapped: int) -> Steps:
        found = steps_between({}, {0: report(0, count, 1_000)}, 2)
        assert found is not None
        return replace(found, overlapped=overlapped / count)

    beyond = less(run(*long), run(*short))
    assert beyond is not None and beyond.overlapped == pytest.approx(wanted)


@pytest.mark.parametrize("short_steps", [6, 1])  # none of one step is timed
def test_a_device_tells_its_phases_and_when_it_was_idle(short_steps: int) -> None:
    long, short = (steps_between({}, {0: on_device(4, n)}, 2) for n in (30 + short_steps, short_steps))
    assert long is not None and short is not None
    assert long.device == pytest.approx((240 + 30 * (30 + short_steps)) * 1e-9 / (34 + short_steps))
    decode = less(long, short)
    assert decode is not None and decode.count == 30
    assert decode.seconds == pytest.approx(40e-9) and decode.device == pytest.approx(30e-9)
    assert [decode.phases[name] for name in PHASES] == pytest.approx([n * 1e-9 for n in range(1, 7)])
    assert decode.phases["rest"] == pytest.approx(9e-9) and decode.phases["idle"] == pytest.approx(10e-9)
    assert decode.host_share == pytest.approx(0.25) and decode.overlapped == pytest.approx(1 / 3)
    assert sum(decode.phases.values()) == pytest.approx(decode.seconds)


def captured(mixed: int, decoding: int, timed: int) -> RankStatistics:
    """Steps beside prompts of 100 ns, 90 of them on the device; captured ones of single tokens of 40 and 35.
    Their phases take 1, 2 ... 6 ns, and three times as long in those that are timed: 63 ns."""
    told = on_device(mixed, decoding)
    phases = {f"step/{name}": 3 * timed * (i + 1) for i, name in enumerate(PHASES)}
    alone = {"step/decode": 40 * decoding, "step/decode_device": 35 * decoding}
    whole = {"step/total": 100 * mixed + 40 * decoding, "step/device": 90 * mixed + 35 * decoding}
    counters = {"decode_steps": decoding, "decode_device_steps": decoding, "timed_steps": timed}
    return replace(
        told,
        sums={**told.sums, **phases, **alone, **whole},
        counters={**told.counters, **counters, "decode_tokens": 3 * decoding},
    )


@pytest.mark.parametrize("short_mixed", [7, 4, 9])  # the longer run has 7
def test_captured_steps_are_told_of_alone_and_add_up(short_mixed: int) -> None:
    """Also where the timed ones are slower than the mean: the rest is negative then, and says so."""
    long = steps_between({}, {0: captured(7, 40, timed=2)}, 2)
    short = steps_between({}, {0: captured(short_mixed, 8, timed=0)}, 2)
    assert long is not None and short is not None
    decode = less(long, short)
    assert decode is not None and decode.count == 40 and decode.tokens == 3
    assert (decode.seconds, decode.device) == (pytest.approx(40e-9), pytest.approx(35e-9))
    assert [decode.phases[name] for name in PHASES] == pytest.approx([3e-9 * n for n in range(1, 7)])
    assert decode.phases["rest"] == pytest.approx((35 - 63) * 1e-9)
    assert decode.phases["idle"] == pytest.approx(5e-9) and decode.host_share == pytest.approx(5 / 40)
    assert sum(decode.phases.values()) == pytest.approx(decode.seconds)


def test_bounds_are_bytes_over_rates() -> None:
    spec = read_spec(DEMO)
    assert isinstance(spec.attention, GqaSpec)
    steps = Steps(
        5, 1.0, {}, tokens=12.0, active=(3.0, 2.0), load=(1, 1), sent={"dispatch": 700.0, "combine": 0}
    )
    plain = bounds(spec, Dtype.FLOAT32, steps, 100, Rates(memory=1e6, link=1e3, packed=False))
    part = footprint(spec, Dtype.FLOAT32, packed=False).replicated
    cache = 6 * 100 * spec.num_layers * 2 * spec.attention.kv_heads * spec.attention.head_dim * 4
    assert plain["attention"] == pytest.approx((part["attention"] + part["norms"] + cache) / 1e6)
    assert plain["router"] == pytest.approx(
        sum(spec.sparse_layers) * spec.router.num_experts * spec.hidden * 4e-6
    )
    experts = 3 * sum(spec.sparse_layers) * 3 * spec.expert_ffn * spec.hidden * 4
    rest = part.get("shared experts", 0) + part.get("dense FFN", 0)
    assert plain["experts"] == pytest.approx((experts + rest) / 1e6)
    assert plain["sample"] == pytest.approx(spec.vocab_size * spec.hidden * 4e-6)
    assert plain["dispatch"] == pytest.approx(0.7) and "combine" not in plain  # nothing left the rank
    windowed = replace(spec, attention=replace(spec.attention, window=10))
    short = bounds(windowed, Dtype.FLOAT32, steps, 100, Rates(1e6, 1e3, packed=False))
    assert plain["attention"] - short["attention"] == pytest.approx(0.9 * cache / 1e6)
    codes = bounds(spec, Dtype.FLOAT32, steps, 100, Rates(1e6, 1e3, packed=False, kv_dtype="fp8_e4m3"))
    assert plain["attention"] - codes["attention"] == pytest.approx(0.75 * cache / 1e6)


@pytest.mark.parametrize("seconds", [-1e-6, 0.0, 1e-12])
def test_the_host_share_is_a_share_whatever_noise_does(seconds: float) -> None:
    """A longer run may take less time than a shorter one on a busy machine."""
    found = steps_between({}, {0: report(0, 4, 1_000)}, 2)
    assert found is not None and found.phases["host"] > 0
    assert 0 <= replace(found, seconds=seconds).host_share <= 1
