"""The runner around the decoder: order of halves, empty steps, sampler state, measurements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ep_server.backends.assembly import LoadParams, load_model
from ep_server.backends.cpu.runner import ModelRunner
from ep_server.exchange.api import Exchange, ExchangeSpec, Payload
from ep_server.models import timers
from ep_server.models.timers import Phase, PhaseClock
from ep_server.records import Request, Sampling, SeqSlice, StepBatch, Stopping
from ep_server.testing.reference_exchange import ReferenceExchange
from tests.support.models.checkpoints import EXPERTS, HIDDEN, TOP_K, Tiny
from tests.support.models.driver import BLOCK, BLOCKS, GreedySampler, alone, generate

Get = Callable[[str], Tiny]
IDLE = StepBatch((), 0)


class Recorder:
    """Writes down the halves of an exchange as they are called."""

    def __init__(self, inner: Exchange, log: list[str]) -> None:
        self.spec, self.normal = inner.spec, None
        self._inner, self._log, self._count = inner, log, 0

    def dispatch_send(self, x: torch.Tensor, *routing: Any) -> Any:
        self._count += 1
        return self._half(f"dispatch {len(x)}", self._inner.dispatch_send(x, *routing))

    def combine_send(self, out: torch.Tensor, received: Any) -> Any:
        return self._half("combine", self._inner.combine_send(out, received))

    def _half(self, name: str, pending: Any) -> Any:
        self._log.append(f"send {name}")
        return Recv(pending, self._log, name)


class Recv:
    def __init__(self, inner: Any, log: list[str], name: str) -> None:
        self._inner, self._log, self._name = inner, log, name

    def recv(self) -> Any:
        self._log.append(f"recv {self._name}")
        return self._inner.recv()


def recorded(path: Any) -> tuple[ModelRunner, list[str]]:
    model = load_model(LoadParams(str(path), 0, (0,) * EXPERTS))
    spec = ExchangeSpec(0, 1, (0,) * EXPERTS, 64, HIDDEN, TOP_K, Payload.FP32)
    log: list[str] = []
    recorder: Any = Recorder(ReferenceExchange(spec), log)
    return model.runner(recorder, GreedySampler(), BLOCKS, BLOCK), log


def step(*lengths: int) -> StepBatch:
    slices = tuple(SeqSlice(i, 0, [i] * n, [i], True) for i, n in enumerate(lengths))
    return StepBatch(slices, sum(lengths))


def test_two_micro_batches_hide_each_other(tiny: Get) -> None:
    runner, log = recorded(tiny("qwen3_moe").path)
    with torch.inference_mode():
        runner.run(step(1, 1, 1), micro_batches=2)
    layer = [
        "send dispatch 2",
        "send dispatch 1",
        "recv dispatch 2",
        "send combine",
        "recv dispatch 1",
        "send combine",
        "recv combine",
    ]
    assert log == [*layer, "send dispatch 2", "recv combine", "send dispatch 1", *layer[2:], "recv combine"]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_idle_rank_takes_part(tiny: Get, micro_batches: int) -> None:
    runner, log = recorded(tiny("deepseek_v3").path)  # one dense layer, two sparse ones
    with torch.inference_mode():
        assert runner.run(IDLE, micro_batches) == []
    assert log.count("send dispatch 0") == log.count("recv combine") == 2 * micro_batches


def test_tokens_come_in_the_order_of_the_slices(tiny: Get) -> None:
    runner, _ = alone(tiny("qwen3_moe").path)
    batch = step(3, 1, 2)
    partial = SeqSlice(7, 0, [1, 2], [9], False)
    with torch.inference_mode():
        tokens = runner.run(StepBatch((*batch.slices, partial), 8))
    assert [t.number for t in tokens] == [0, 1, 2]


def test_sampler_state_follows_the_request(tiny: Get) -> None:
    sampler = GreedySampler()
    model = load_model(LoadParams(str(tiny("qwen3_moe").path), 0, (0,) * EXPERTS))
    spec = ExchangeSpec(0, 1, (0,) * EXPERTS, 64, HIDDEN, TOP_K, Payload.FP32)
    runner = model.runner(ReferenceExchange(spec), sampler, BLOCKS, BLOCK)
    runner.add(Request("a", 4, (1,), Sampling(), Stopping(1)))
    assert list(sampler.logits) == [4]
    runner.remove(4)
    assert not sampler.logits


def test_a_kv_block_is_overwritten_not_added_to(tiny: Get) -> None:
    model = tiny("deepseek_v2-groups")
    runner, _ = alone(model.path)
    for _ in range(2):  # the second time over the blocks of the first
        assert generate(runner, model.prompts[:2], 5) == [tokens[:5] for tokens in model.tokens[:2]]


def test_fp8_dispatch_of_a_bfloat16_model(tmp_path: Any) -> None:
    from tests.support.models.checkpoints import CASES, random_model

    case = next(c for c in CASES if c.name == "qwen3_moe")
    wide = type(case)(case.name, case.family, case.options | {"hidden_size": 128}, scale=0.1)
    random_model(wide, 3).save_pretrained(tmp_path)
    rows = {}
    for payload in (Payload.FP32, Payload.BF16, Payload.FP8):
        model = load_model(LoadParams(str(tmp_path), 0, (0,) * EXPERTS, "bfloat16"))
        sampler = GreedySampler()
        spec = ExchangeSpec(0, 1, (0,) * EXPERTS, 64, 128, TOP_K, payload)
        runner = model.runner(ReferenceExchange(spec), sampler, BLOCKS, BLOCK)
        with torch.inference_mode():
            runner.run(step(4))
        rows[payload] = sampler.logits[0][0]
    spread = rows[Payload.FP32].std()
    assert (rows[Payload.BF16] - rows[Payload.FP32]).std() < 0.05 * spread
    assert 0 < (rows[Payload.FP8] - rows[Payload.FP32]).std() < 0.3 * spread


def test_statistics_count_rows_and_steps(tiny: Get) -> None:
    model = tiny("deepseek_v3")
    runner, _ = alone(model.path)
    generate(runner, [model.prompts[1]], 4)
    statistics = runner.statistics()
    tokens, sparse_layers, steps = len(model.prompts[1]) + 3, 2, 4
    assert sum(statistics.expert_tokens.values()) == tokens * sparse_layers * TOP_K
    assert set(statistics.expert_tokens) == set(range(EXPERTS))
    phases = ("attention", "router", "dispatch", "experts", "combine", "sample")
    assert set(statistics.histograms) == set(statistics.sums) == {f"step/{p}" for p in phases}
    assert all(sum(counts) == steps for counts in statistics.histograms.values())
    assert all(total > 0 for total in statistics.sums.values())
    spent = sum(statistics.sums[f"step/{p}"] for p in ("router", "dispatch", "experts", "combine"))
    assert statistics.counters["moe_layers"] == sparse_layers * steps
    assert statistics.counters["moe_layer_ns"] == spent


def test_laps_of_a_step_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100, 101, 109, 112, 10_000, 10_020])
    monkeypatch.setattr(timers, "perf_counter_ns", lambda: next(now))
    clock = PhaseClock()
    clock.start()
    clock.lap(Phase.ROUTER)  # 1 ns
    clock.lap(Phase.EXPERTS)  # 8 ns
    clock.lap(Phase.ROUTER)  # 3 more
    clock.finish()
    clock.start()
    clock.lap(Phase.EXPERTS)  # 20 ns
    clock.finish()
    counts = {name: {b: n for b, n in enumerate(row) if n} for name, row in clock.histograms().items()}
    assert counts["step/router"] == {2: 1}  # 4 ns
    assert counts["step/experts"] == {3: 1, 4: 1}
    assert counts["step/sample"] == {}
    assert clock.sums() == {f"step/{p.name.lower()}": {1: 4, 3: 28}.get(p, 0) for p in Phase}
