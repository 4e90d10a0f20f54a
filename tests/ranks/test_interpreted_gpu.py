"""Rank processes that run as on a GPU, a step ahead of the host, padded to buckets: transformers' tokens."""

from __future__ import annotations

import pytest

from ep_server.ranks.launcher import RankProcesses
from tests.harness.checkpoints import Tiny
from tests.harness.rank_group import Recorder, greedy, rank_config


@pytest.mark.parametrize("ranks", [2])
async def test_two_ranks_one_step_ahead(tiny: Tiny, ranks: int) -> None:
    config = rank_config(tiny.path, ranks, scheduler__max_running=2, scheduler__max_step_tokens=8)
    group = RankProcesses(config, module="tests.harness.interpreted_rank")
    seen, count = Recorder(), 3
    try:
        await group.start(seen, seen.on_progress)
        prompts = list(enumerate(tiny.prompts[:3], start=1))
        for number, prompt in prompts:
            group.submit(number % ranks, greedy(number, prompt, count))
        await seen.until(lambda: len(seen.finished) == len(prompts), 120)
        assert {n: tuple(seen.tokens[n]) for n, _ in prompts} == {
            number: tiny.tokens[number - 1][:count] for number, _ in prompts
        }
        stages = {stage for _, stage, _, _ in seen.progress}
        assert "graphs" in stages
    finally:
        await group.stop()
    assert group.exit_codes == [0] * ranks
