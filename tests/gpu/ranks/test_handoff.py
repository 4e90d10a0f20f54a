"""A prompt's KV blocks move between GPUs, from rank processes of one server to those of another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ep_server.client import AsyncClient, PrefillDecode
from tests.support.fabric.fabric_ends import needs
from tests.support.handoff.servers import continued, counted, held, pair
from tests.support.models.answers import Answers

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
GPUS = torch.cuda.device_count()
LENGTH, PROMPTS = 120, 6
FIELDS: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 0.0}


def prompt(number: int) -> list[int]:
    return [number, *((number + 5 * n + n * n) % 251 for n in range(1, LENGTH))]


@pytest.mark.parametrize(
    ("ranks", "blocks", "step"),
    [
        pytest.param((min(GPUS, 2), 1), (16, 32), 32, id="chunks"),
        pytest.param((1, min(GPUS, 2)), (32, 16), 128, id="one-step"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_moe-wide-heads", "deepseek_v3"])
async def test_the_tokens_of_a_single_server(
    answers: dict[str, Answers], name: str, ranks: tuple[int, int], blocks: tuple[int, int], step: int
) -> None:
    """In float32, whose tokens do not depend on the rank. Ranks of both servers share GPUs."""
    common = {"model__path": str(answers[name].path), "parallel__device": "cuda"}
    common |= {"scheduler__max_running": 8, "scheduler__max_step_tokens": step}
    sides: list[dict[str, Any]] = [
        {**common, "parallel__ranks": count, "scheduler__block_size": size}
        for count, size in zip(ranks, blocks, strict=True)
    ]
    async with (
        pair(*sides) as (prefill, decode),
        AsyncClient(decode.server.address) as client,
        PrefillDecode(prefill.server.address, client, handle_seconds=60) as handing,
    ):
        for number in range(PROMPTS):
            ids = prompt(number)
            alone = await decode.client.complete(ids, timeout=60, bypass_prefix_cache=True, **FIELDS)
            later = await continued(decode, ids, await held(prefill, ids), bypass_prefix_cache=True, **FIELDS)
            stream = await handing.generate(ids, bypass_prefix_cache=True, **FIELDS)
            during = await stream.read()
            assert during.finished is not None
            assert later.token_ids == during.token_ids == alone.token_ids
            for finished in (later.finished, during.finished):
                assert finished.usage.cached_tokens == LENGTH - 1
        await counted(decode, "handoffs/received", 2 * PROMPTS)
        assert decode.count("handoff_fetches/device") == 2 * PROMPTS
        assert decode.count("handoff_fetches/device") == decode.count("handoffs/received")


@pytest.mark.parametrize("transport", ["tcp", "libfabric"])
async def test_rows_move_between_hosts(answers: dict[str, Answers], transport: str) -> None:
    """As if the servers had no host in common: through host memory of both."""
    if transport == "libfabric":
        needs("system")
    common = {"model__path": str(answers["qwen3_moe-wide-heads"].path), "parallel__device": "cuda"}
    common |= {"scheduler__max_running": 8, "scheduler__max_step_tokens": 32}
    common |= {"handoff__transport": transport, "fabric__address": "127.0.0.1"}
    sizes: list[dict[str, Any]] = [{**common, "scheduler__block_size": size} for size in (16, 32)]
    async with pair(*sizes) as (prefill, decode):
        for number in range(PROMPTS):
            ids = prompt(number)
            alone = await decode.client.complete(ids, timeout=60, bypass_prefix_cache=True, **FIELDS)
            handle = await held(prefill, ids)
            handle.local = ""
            output = await continued(decode, ids, handle, bypass_prefix_cache=True, **FIELDS)
            assert output.token_ids == alone.token_ids
            assert output.finished.usage.cached_tokens == LENGTH - 1
        await counted(decode, f"handoff_fetches/{transport}", PROMPTS)
