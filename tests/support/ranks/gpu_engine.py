"""Groups of ranks on GPUs and what they must answer."""

from __future__ import annotations

import torch

from ep_server.ranks.launcher import RankProcesses
from tests.support.models.answers import Answers
from tests.support.ranks.rank_group import Recorder, greedy, rank_config

COUNT = 24


SIZES = [n for n in (1, 2, 4) if n <= torch.cuda.device_count()] or [1]


ALIKE = 4  # tokens of an answer: one of a prompt, the others of captured steps


MANY = 64  # sequences of a rank: the least bucket whose micro-batches are chosen by their times


async def drawn(
    model: Answers, ranks: int, times: int = 2, **fields: object
) -> tuple[dict[int, tuple[int, ...]], Recorder]:
    """Tokens of every prompt so many times over, spread over the ranks; and what the ranks told."""
    settings = {"parallel__device": "cuda", "scheduler__max_running": 6, **fields}
    group, heard = RankProcesses(rank_config(model.path, ranks, **settings)), Recorder()
    prompts = list(enumerate(model.prompts * times, start=1))
    count = min(COUNT, len(model.tokens[0]))
    heard.ready = await group.start(heard, heard.on_progress)
    try:
        for number, prompt in prompts:
            group.submit(number % ranks, greedy(number, prompt, count))
        await heard.until(lambda: len(heard.finished) == len(prompts), 120)
        assert not heard.failed and not heard.lost
        await heard.parked(ranks, len(prompts))
    finally:
        await group.stop()
    assert group.exit_codes == [0] * ranks
    return {number: tuple(heard.tokens[number]) for number, _ in prompts}, heard


def begins_alike(model: Answers, tokens: dict[int, tuple[int, ...]], times: int = 2) -> bool:
    """Half of the answers begin as those of float32. Others may not: a near tie turns with any rounding.

    On the CPU it is three of four of every family, and none where a step goes wrong.
    """
    wanted = dict(enumerate(model.tokens * times, start=1))
    alike = [answer[:ALIKE] == wanted[n][:ALIKE] for n, answer in tokens.items()]
    return 2 * sum(alike) >= len(wanted) and all(len(answer) == COUNT for answer in tokens.values())
