"""Grammars on a GPU that runs a step ahead: masks reach the device beside a step, in any mix of rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ep_server.ranks.launcher import RankProcesses
from ep_server.records import Grammar, GrammarKind, Request, Sampling, Stopping
from ep_server.text.grammars.notation import program_of
from tests.support.ranks.rank_group import Recorder, rank_config
from tests.support.structured import byte_checkpoint
from tests.support.tokenizers import EOS

pytestmark = pytest.mark.gpu
SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 5}
NUMBER = Grammar(GrammarKind.REGEX, "[0-9]{3,20}")
ENDS = Stopping(200, eos_token_ids=frozenset({EOS}))
FREE = Stopping(40)


def bound(number: int, grammar: Grammar, **sampling: object) -> Request:
    program = Grammar(GrammarKind.PROGRAM, program_of(grammar, {}))
    chosen = Sampling(**{"temperature": 1.0, "seed": number, **sampling})
    return Request(f"r{number}", number, (1, number), chosen, ENDS, grammar=program)


async def test_texts_match_beside_free_rows(tmp_path: Path) -> None:
    """Requests come and go, so that rows, groups and sizes of steps change."""
    array = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    asked = [bound(n, array) for n in range(1, 17)]
    asked += [bound(n, NUMBER, logprobs=3, presence_penalty=0.5) for n in range(17, 25)]
    asked += [Request(f"r{n}", n, (1, n), Sampling(seed=n), FREE) for n in range(25, 33)]
    asked = [request for group in zip(asked[:16], asked[16:], strict=True) for request in group]
    config = rank_config(
        byte_checkpoint(tmp_path),
        1,
        model__load_format="dummy",
        model__dtype="bfloat16",
        parallel__device="cuda",
        scheduler__max_running=12,
        scheduler__kv_blocks=1024,
    )
    group, heard = RankProcesses(config), Recorder()
    await group.start(heard, heard.on_progress)
    try:
        for request in asked:
            group.submit(0, request)
        await heard.until(lambda: len(heard.finished) == len(asked), 120)
        await heard.parked(1, len(asked))
    finally:
        await group.stop()
    assert not heard.failed and not heard.lost
    for request in asked:
        drawn = heard.tokens[request.number]
        if request.grammar is None:
            assert len(drawn) == FREE.max_new_tokens
            continue
        assert drawn[-1] == EOS
        text = bytes(drawn[:-1]).decode()
        if request.sampling.logprobs is None:
            assert 2 <= len(json.loads(text)) <= 5
        else:
            assert re.fullmatch("[0-9]{3,20}", text)
    (counters,) = [told.counters for told in heard.statistics.values()]
    assert 0 < counters["masked_steps"] <= counters["run_steps"] and counters["kernels_compiled"] == 0
