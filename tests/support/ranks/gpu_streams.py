"""Requests to a server of two ranks on GPUs that come and go, and what their outputs must be."""

from __future__ import annotations

from typing import Any

from ep_server.config import Config
from tests.support.models.answers import Answers
from tests.support.ranks.gpu_engine import ALIKE, COUNT
from tests.support.raw_client import Output

RANKS, NEW = 2, 4 * COUNT


def config_of(model: Answers, **fields: object) -> Config:
    values = {
        "grpc.port": 0,
        "model.path": str(model.path),
        "model.dtype": "bfloat16",
        "parallel.device": "cuda",
        "parallel.ranks": RANKS,
        "resilience.max_losses": 100,
        "resilience.rank_losses": 0,
        "scheduler.block_size": 16,
        "scheduler.kv_blocks": 512,
        "scheduler.max_running": 16,
        "scheduler.max_step_tokens": 128,
    }
    return Config.from_values(values | {name.replace("__", "."): value for name, value in fields.items()})


def requests(model: Answers) -> list[dict[str, Any]]:
    """Each prompt in every way whose state lives on the device."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "seed": 2, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 0.0, "output_logprobs": True, "top_n": 2},
    ]
    every = {"max_new_tokens": NEW, "ignore_eos": True}
    return [every | way | {"token_ids": list(prompt)} for prompt in model.prompts for way in ways]


def check(model: Answers, outputs: list[Output], undisturbed: list[Output]) -> None:
    """Every position once. Greedy outputs begin as those of float32; others may turn at a near tie."""
    assert [len(output.token_ids) for output in outputs] == [NEW] * len(undisturbed)
    greedy = [output.token_ids[:ALIKE] for output in outputs[::4]]
    expected = [list(tokens[:ALIKE]) for tokens in model.tokens]
    assert 2 * sum(map(list.__eq__, greedy, expected)) >= len(expected)
    same = sum(
        one == other
        for output, before in zip(outputs, undisturbed, strict=True)
        for one, other in zip(output.token_ids, before.token_ids, strict=True)
    )
    share = same / (NEW * len(outputs))
    print(f"{share:.1%} of tokens as in an undisturbed run")
    assert share > 0.3, "most outputs must stay alike until the loss"
