"""Groups with made-up weights: options reach every rank, and tokens do not depend on how many there are."""

from __future__ import annotations

import shutil
from pathlib import Path

from ep_server.ranks.launcher import RankProcesses
from tests.support.models.checkpoints import Tiny
from tests.support.ranks.rank_group import Recorder, greedy, rank_config

NEW = 10


async def tokens(path: Path, ranks: int, **fields: object) -> list[list[int]]:
    """Of two prompts, one on the last rank."""
    config = rank_config(path, ranks, model__load_format="dummy", **fields)
    group, heard = RankProcesses(config), Recorder()
    await group.start(heard, heard.on_progress)
    try:
        for number, rank in ((1, 0), (2, ranks - 1)):
            group.submit(rank, greedy(number, [5, 6, 7 + number] * number, NEW))
        await heard.until(lambda: len(heard.finished) == 2)
        await heard.parked(ranks, 2)
        assert all(count > 0 for count in heard.counter("experts_active"))
    finally:
        await group.stop()
    return [heard.tokens[1], heard.tokens[2]]


async def test_one_rank_and_two_draw_the_same(tiny: Tiny, tmp_path: Path) -> None:
    shutil.copy(tiny.path / "config.json", tmp_path)
    alone = await tokens(tmp_path, 1, model__routing="uniform")
    assert [len(drawn) for drawn in alone] == [NEW, NEW]
    assert await tokens(tmp_path, 2, model__routing="uniform") == alone
    assert await tokens(tmp_path, 1, model__routing="uniform", model__seed=1) != alone
