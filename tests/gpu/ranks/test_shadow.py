"""GPU ranks load experts from the host shadow and take new weights under captured graphs; no stream ends."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_server.ranks.group import plan_group
from ep_server.ranks.hosts import OneHost
from ep_server.scheduler.placement import first_placement
from ep_server.scheduler.placement_file import placement_values
from ep_server.v1 import control_pb2
from tests.support.models.answers import Answers
from tests.support.models.perturbed import perturbed
from tests.support.models.poisoned import poison_experts
from tests.support.ranks.gpu_streams import NEW, RANKS, check, config_of, requests
from tests.support.ranks.serving import Serving, serving
from tests.support.raw_client import Output

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(300),
]
WAIT = 120.0


def copied(model: Answers, into: Path) -> Answers:
    """The same, to be poisoned."""
    shutil.copytree(model.path, into)
    return Answers(model.name, into, model.prompts, model.tokens)


def without_copies(model: Answers, into: Path) -> Path:
    """A placement whose spare slots are empty: after a loss the other rank loads what it lacks."""
    plan = plan_group(config_of(model, scheduler__kv_blocks=64)).placement
    assert plan is not None
    layers, experts, slots = len(plan.experts), plan.num_experts, plan.slots_per_rank
    placement = first_placement(layers, experts, slots, range(RANKS), RANKS)
    into.write_text(json.dumps(placement_values(placement)))
    return into


def filled(served: Serving) -> bool:
    """Whether each entry of the host shadow is there: GPU ranks write them while they serve."""
    hosts = served.group._hosts
    assert isinstance(hosts, OneHost) and hosts._local is not None and hosts._shared is not None
    layout, fd = hosts._local.plan.shadow, hosts._shared.shadow
    assert layout is not None and fd is not None
    return all(memoryview(os.pread(fd, 4 * layout.count, 0)).cast("i"))


async def test_lost_experts_come_from_the_shadow(answers: dict[str, Answers], tmp_path: Path) -> None:
    """Those of the checkpoint are NaN by then; the new process gets its own from there too."""
    model = copied(answers["qwen3_moe"], tmp_path / "model")
    fields = {"resilience__shadow": "on", "exchange__timeout_seconds": 60.0}
    fields["resilience__placement"] = str(without_copies(model, tmp_path / "placement.json"))
    async with serving(config_of(model, **fields)) as served:
        undisturbed = await served.run(requests(model))
        await served.until(lambda: filled(served))
        assert poison_experts(model.path)
        for rank in (1, 0):
            check(model, await served.lose(rank, NEW // 2, requests(model)), undisturbed)
        check(model, await served.run(requests(model)), undisturbed)


async def update(served: Serving, path: Path) -> Any:
    request = control_pb2.UpdateWeightsRequest(path=str(path))
    return await served.client.control.UpdateWeights(request, timeout=WAIT)


async def alone(served: Serving, model: Answers) -> list[Output]:
    """Greedy requests one after the other: steps of the same sizes every time."""
    fields = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True, "timeout": WAIT}
    return [await served.client.complete(list(prompt), **fields) for prompt in model.prompts]


def share(outputs: list[Output], others: list[Output]) -> float:
    """Of equal tokens."""
    pairs = [
        (one, other)
        for output, like in zip(outputs, others, strict=True)
        for one, other in zip(output.token_ids, like.token_ids, strict=True)
    ]
    return sum(one == other for one, other in pairs) / len(pairs)


@pytest.mark.parametrize("shadow", ["off", "on"])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
async def test_new_weights_are_those_of_a_new_server(
    answers: dict[str, Answers], name: str, shadow: str, tmp_path: Path
) -> None:
    model = answers[name]
    other = Answers(name, perturbed(model.path, tmp_path / "other", share=1.0), model.prompts, model.tokens)
    async with serving(config_of(other)) as served:
        expected = await alone(served, model)
        loaded = await served.run(requests(model))
    fields = {"resilience__shadow": shadow, "model__updates": "/", "exchange__timeout_seconds": 60.0}
    async with serving(config_of(model, **fields)) as served:
        old = await alone(served, model)
        assert share(old, expected) < 0.5
        running = asyncio.ensure_future(served.run(requests(model)))
        await served.until(lambda: any(len(one.output) > 4 for one in served.server.engine._requests))
        done = await update(served, other.path)
        print(f"{done.bytes} bytes, paused {done.pause_seconds:.4f} s, bound {done.pause_bound_seconds:.4f}")
        assert done.version == 1
        assert [len(output.token_ids) for output in await running] == [NEW] * len(requests(model))
        same = share(await alone(served, model), expected)
        print(f"{same:.1%} of tokens as of a new server")
        assert same > 0.7
        if shadow == "on":
            poison_experts(other.path)
        outputs = await served.lose(1, NEW // 2, requests(model))
        assert share(outputs, loaded) > 0.3
        assert share(await alone(served, model), expected) > 0.7
