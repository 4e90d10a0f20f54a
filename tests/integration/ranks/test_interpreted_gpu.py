"""Rank processes that run as on a GPU, a step ahead of the host, padded to buckets: transformers' tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from ep_server.models.timers import Phase
from ep_server.ranks.launcher import RankProcesses
from ep_server.ranks.local_ranks import WORKER
from ep_server.records import Grammar, GrammarKind, KvSource, Request, Sampling, Stopping
from tests.support.models.checkpoints import Tiny
from tests.support.ranks.rank_group import Recorder, greedy, rank_config
from tests.support.structured import byte_checkpoint
from tests.support.tokenizers import EOS

Prompts = Sequence[tuple[int, ...]]


INTERPRETED = "tests.support.ranks.interpreted_rank"
TWO_HOSTS = "tests.support.ranks.interpreted_hierarchical"
COUNT = 3


async def tokens(
    path: Path, ranks: int, module: str, prompts: Prompts, **fields: object
) -> tuple[list[list[int]], Recorder]:
    """Of each prompt, spread over the ranks; and what the ranks told."""
    config = rank_config(path, ranks, scheduler__max_running=2, scheduler__max_step_tokens=8, **fields)
    group, heard = RankProcesses(config, module=module), Recorder()
    try:
        await group.start(heard, heard.on_progress)
        captured = {rank: done == total for rank, stage, done, total in heard.progress if stage == "graphs"}
        assert captured == ({} if module == WORKER else dict.fromkeys(range(ranks), True))
        for number, prompt in enumerate(prompts, start=1):
            group.submit(number % ranks, greedy(number, prompt, COUNT))
        await heard.until(lambda: len(heard.finished) == len(prompts), 280)
        await heard.parked(ranks, len(prompts))
    finally:
        await group.stop()
    assert group.exit_codes == [0] * ranks
    return [heard.tokens[number] for number in range(1, len(prompts) + 1)], heard


async def sizes(path: Path, module: str, dtype: str, prompt: tuple[int, ...]) -> list[object]:
    """Bytes of weights, cache and exchange of each of two ranks, and the tokens of a prompt."""
    small = {"scheduler__max_running": 2, "scheduler__max_step_tokens": 8, "parallel__graphs": False}
    config = rank_config(path, 2, model__dtype=dtype, **small)
    group, heard = RankProcesses(config, module=module), Recorder()
    try:
        ready = await group.start(heard, heard.on_progress)
        group.submit(1, greedy(1, prompt, COUNT))
        await heard.until(lambda: heard.finished == [1], 280)
    finally:
        await group.stop()
    return [heard.tokens[1], *((one.weight_bytes, one.kv_bytes, one.exchange_bytes) for one in ready)]


@pytest.mark.parametrize("module", [WORKER, INTERPRETED])
async def test_ranks_take_the_dtype_of_the_tensors(tiny: Tiny, module: str, tmp_path: Path) -> None:
    """config.json names none, the tensors are float32: so are weights, cache and exchange of every rank."""
    config = json.loads((tiny.path / "config.json").read_text())
    assert config.pop("dtype") == "float32"
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(tiny.path / "model.safetensors")
    prompt = tiny.prompts[1]
    expected = await sizes(tiny.path, module, "float32", prompt)
    assert await sizes(tmp_path, module, "auto", prompt) == expected
    assert expected[0] == list(tiny.tokens[1][:COUNT])


@pytest.mark.parametrize(
    ("overlap", "mode"),
    [
        ("off", "auto"),
        ("on", "auto"),
        ("off", "normal"),
        pytest.param("on", "normal", marks=pytest.mark.slow),
    ],
)
async def test_two_ranks_one_step_ahead(tiny: Tiny, overlap: str, mode: str) -> None:
    """Three prompts on two ranks: in the end one of them has nothing to run. Some steps are timed."""
    fields = {"parallel__overlap": overlap, "metrics__device_phases": 2, "exchange__mode": mode}
    drawn, heard = await tokens(tiny.path, 2, INTERPRETED, tiny.prompts[:3], **fields)
    assert drawn == [list(expected[:COUNT]) for expected in tiny.tokens[:3]]
    for told in heard.statistics.values():
        counters, phases = told.counters, [told.sums[f"step/{phase.name.lower()}"] for phase in Phase]
        assert counters["overlap_steps"] == (counters["run_steps"] if overlap == "on" else 0)
        undivided = counters["run_steps"] - counters["overlap_steps"]
        assert counters["normal_steps"] == (undivided if mode == "normal" else 0)
        assert 0 < counters["timed_steps"] < counters["device_steps"] == counters["run_steps"]
        assert all(phases) and sum(phases) <= told.sums["step/device"] <= told.sums["step/total"]
        decoding = counters["decode_steps"]
        captured = decoding if overlap == "on" else counters["run_steps"]  # or chunks of prompts too
        assert counters["graph_steps"] == captured
        assert 0 < decoding == counters["decode_device_steps"] < counters["run_steps"]
        assert 0 < told.sums["step/decode_device"] < told.sums["step/device"]
        assert 0 < told.sums["step/decode"] < told.sums["step/total"]
        assert sum(told.histograms["step/device"]) == counters["device_steps"]
    assert any(told.counters["padded_tokens"] for told in heard.statistics.values())


@pytest.mark.parametrize("graphs", [True, False])
async def test_layers_leave_a_rank_that_runs_ahead(tiny: Tiny, graphs: bool) -> None:
    """It plans the next step before it publishes one. A CPU rank takes its prompts over, in other blocks."""
    asked = [(p, list(t[:COUNT])) for p, t in zip(tiny.prompts, tiny.tokens, strict=True) if len(p) > 1]
    prompts, key = [prompt for prompt, _ in asked], bytes(range(16))
    fields = {"scheduler__max_running": 2, "scheduler__max_step_tokens": 8, "parallel__graphs": graphs}
    prefill = RankProcesses(rank_config(tiny.path, 1, handoff__role="prefill", **fields), module=INTERPRETED)
    decode = RankProcesses(rank_config(tiny.path, 1, handoff__role="decode", scheduler__block_size=7))
    first, second = Recorder(), Recorder()
    try:
        (there,) = await prefill.start(first, first.on_progress)
        await decode.start(second, second.on_progress)
        for number, prompt in enumerate(prompts, start=1):
            name = key[:-1] + bytes([number])
            source = KvSource(there.kv_address, there.kv_local, name, len(prompt))
            decode.submit(0, greedy(number, prompt, COUNT, source=source, bypass_prefix_cache=True))
            prefill.submit(0, greedy(number, prompt, 1, hold=name, bypass_prefix_cache=True))
        await second.until(lambda: len(second.finished) == len(prompts), 280)
        await second.parked(1, len(prompts))
    finally:
        await prefill.stop()
        await decode.stop()
    drawn = [second.tokens[number] for number in range(1, len(prompts) + 1)]
    assert drawn == [expected for _, expected in asked]
    counters = second.statistics[0].counters
    assert counters["handoffs/received"] == len(prompts) and not counters.get("handoffs/failed")


async def test_without_graphs(tiny: Tiny) -> None:
    drawn, heard = await tokens(tiny.path, 2, INTERPRETED, tiny.prompts[:3], parallel__graphs=False)
    assert drawn == [list(expected[:COUNT]) for expected in tiny.tokens[:3]]
    for told in heard.statistics.values():
        assert told.counters.get("graph_steps", 0) == 0 < told.counters["run_steps"]


async def test_experts_drawn_at_random_are_those_of_the_cpu(tiny: Tiny) -> None:
    uniform = {"model__load_format": "dummy", "model__routing": "uniform", "parallel__graphs": False}
    on_cpu, _ = await tokens(tiny.path, 1, WORKER, tiny.prompts[:1], **uniform)
    drawn, heard = await tokens(tiny.path, 1, INTERPRETED, tiny.prompts[:1], **uniform)
    assert drawn == on_cpu
    assert all("timed_steps" not in told.counters for told in heard.statistics.values())


async def bytes_of(path: Path, module: str, asked: Sequence[Request]) -> list[bytes]:
    """What one rank draws for requests that it has all at once."""
    fields = {"model__load_format": "dummy", "scheduler__max_running": 4, "parallel__graphs": False}
    config = rank_config(path, 1, **fields)
    group, heard = RankProcesses(config, module=module), Recorder()
    try:
        await group.start(heard, heard.on_progress)
        for request in asked:
            group.submit(0, request)
        await heard.until(lambda: len(heard.finished) == len(asked), 280)
    finally:
        await group.stop()
    return [bytes(token for token in heard.tokens[n.number] if token < EOS) for n in asked]


async def test_grammars_a_step_ahead(tmp_path: Path) -> None:
    """Masks come while the next step runs. Greedy rows draw what CPU ranks draw, with and without one."""
    path, ends = byte_checkpoint(tmp_path), Stopping(5, eos_token_ids=frozenset({EOS}))
    plain = [Request(f"r{n}", n, (n, 7), Sampling(temperature=0.0), Stopping(5)) for n in (1, 2)]
    digits = Grammar(GrammarKind.PROGRAM, "start: /[0-9]{2,4}(, [a-c]+)?/")
    bound = [
        Request(f"r{n}", n, (n, 7), Sampling(temperature=t, seed=n), ends, grammar=digits)
        for n, t in ((3, 0.0), (4, 1.0))
    ]
    mixed = await bytes_of(path, INTERPRETED, [plain[0], bound[0], plain[1], bound[1]])
    assert await bytes_of(path, WORKER, [*plain, bound[0]]) == [mixed[0], mixed[2], mixed[1]]
    assert all(re.match(rb"[0-9]{2,4}(, [a-c]*|,|$)", text) for text in (mixed[1], mixed[3]))


@pytest.mark.parametrize("mode", ["low_latency", pytest.param("auto", marks=pytest.mark.slow), "normal"])
async def test_ranks_of_two_hosts_with_rows_in_two_parts(tiny: Tiny, mode: str) -> None:
    drawn, heard = await tokens(tiny.path, 3, TWO_HOSTS, tiny.prompts[:3], exchange__mode=mode)
    assert drawn == [list(expected[:COUNT]) for expected in tiny.tokens[:3]]
    if mode != "auto":
        counters = [heard.statistics[rank].counters for rank in range(3)]
        assert all((each["normal_steps"] > 0) is (mode == "normal") for each in counters)
