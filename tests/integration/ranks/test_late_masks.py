"""A request whose masks are late draws what it would draw, and its neighbours do not wait for it."""

from __future__ import annotations

from pathlib import Path

from ep_server.ranks.launcher import RankProcesses
from ep_server.records import Grammar, GrammarKind, Request, Sampling, Stopping
from tests.support.ranks.rank_group import Recorder, rank_config
from tests.support.structured import byte_checkpoint
from tests.support.tokenizers import EOS

SLOW = "tests.support.ranks.slow_masks_rank"
DIGITS = Grammar(GrammarKind.PROGRAM, "start: /[0-9]{3}/")


async def test_late_masks_hold_up_nobody(tmp_path: Path) -> None:
    ends = Stopping(9, eos_token_ids=frozenset({EOS}))
    bound = [Request(f"r{n}", n, (7, n), Sampling(seed=n), ends, grammar=DIGITS) for n in (1, 2)]
    free = [Request(f"r{n}", n, (7, n), Sampling(seed=n), Stopping(60)) for n in (3, 4)]
    config = rank_config(byte_checkpoint(tmp_path), 2, model__load_format="dummy")
    group, heard = RankProcesses(config, module=SLOW), Recorder()
    await group.start(heard, heard.on_progress)
    try:
        for request in (*bound, *free):
            group.submit(request.number % 2, request)
        await heard.until(lambda: len(heard.finished) == 4)
        await heard.parked(2, 4)
    finally:
        await group.stop()
    assert group.exit_codes == [0, 0] and not heard.failed
    for late in (1, 2):  # 160 steps; the other one of its rank takes 60
        assert heard.finished.index(late + 2) < heard.finished.index(late)
    for number in (1, 2):
        text = bytes(heard.tokens[number][:-1])
        assert text.isdigit() and len(text) == 3 and heard.tokens[number][-1] == EOS
