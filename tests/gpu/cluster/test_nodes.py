"""Two nodes with GPUs on one machine: NVLink inside a node, host memory and the loopback between them.

With fewer GPUs than ranks both nodes have the same ones.
"""

from __future__ import annotations

import asyncio
import signal

import pytest
import torch

from tests.support.cluster.nodes import nodes
from tests.support.fabric.fabric_ends import LIBRARIES, usable
from tests.support.models.answers import Answers
from tests.support.raw_client import RawClient

pytestmark = pytest.mark.gpu
COUNT = 16
SECONDS = 240.0  # kernels are compiled at the first start


def shared_by_nodes(ranks: int) -> tuple[str, str]:
    """The GPUs of each node."""
    second = ranks if torch.cuda.device_count() >= 2 * ranks else 0
    here, there = (",".join(map(str, range(first, first + ranks))) for first in (0, second))
    return here, there


async def answer(client: RawClient, prompt: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Greedy tokens of one prompt, computed by this rank."""
    made = await client.complete(
        prompt, temperature=0.0, max_new_tokens=COUNT, ignore_eos=True, dp_rank=rank, timeout=SECONDS
    )
    return tuple(made.token_ids)


async def drawn(model: Answers, ranks: int, *options: str) -> dict[tuple[int, int], tuple[int, ...]]:
    """(rank, prompt) -> tokens, all at once, half of them asked of either node."""
    library = next((name for name in ("wheel", "system") if not usable(name)), "")
    if not library:
        pytest.skip(f"no libfabric: {usable('system')}")
    sizes = (
        "--scheduler-max-step-tokens",
        "32",
        "--scheduler-block-size",
        "4",
        "--exchange-timeout-seconds",
        "60",
    )
    path = ("--fabric-library", LIBRARIES[library]) if LIBRARIES[library] else ()
    values = {"ranks": ranks, "model": model.path, "gpus": shared_by_nodes(ranks)}
    async with nodes(options=("--parallel-device", "cuda", *sizes, *path, *options), **values) as made:
        everyone = [await made.start(node) for node in range(2)]
        addresses = [await node.serving(SECONDS) for node in everyone]
        async with RawClient(addresses[0]) as first, RawClient(addresses[1]) as second:
            keys = [(rank, i) for rank in range(2 * ranks) for i in range(len(model.prompts))]
            asks = [
                answer((first, second)[n % 2], model.prompts[i], rank) for n, (rank, i) in enumerate(keys)
            ]
            found = dict(zip(keys, await asyncio.gather(*asks), strict=True))
        everyone[0].signal(signal.SIGTERM)
        assert [await node.end() for node in everyone] == [0, 0]
    return found


def need(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")


@pytest.mark.parametrize("ranks", [1, 2])
async def test_float32_tokens_are_those_of_transformers(answers: dict[str, Answers], ranks: int) -> None:
    """All rows travel through host memory here: float32 has no other way."""
    need(ranks)
    model = answers["mixtral"]
    found = await drawn(model, ranks, "--model-dtype", "float32")
    assert found == {(rank, i): model.tokens[i][:COUNT] for rank, i in found}


@pytest.mark.parametrize(
    ("name", "ranks", "between"),
    [
        ("mixtral", 1, "hierarchical"),
        ("mixtral", 2, "hierarchical"),
        ("mixtral", 2, "flat"),
        ("qwen3_moe", 2, "hierarchical"),
        ("deepseek_v3", 2, "hierarchical"),
    ],
)
async def test_bfloat16_tokens_begin_as_those_of_float32(
    answers: dict[str, Answers], name: str, ranks: int, between: str
) -> None:
    """Later tokens may differ: a near tie turns with any rounding."""
    need(ranks)
    model = answers[name]
    options = ("--model-dtype", "bfloat16", "--exchange-between-nodes", between)
    found = await drawn(model, ranks, *options)
    first = [tokens[0] == model.tokens[i][0] for (_, i), tokens in found.items()]
    assert sum(first) > len(first) // 2
    assert all(len(tokens) == COUNT for tokens in found.values())
