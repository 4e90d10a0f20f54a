"""Rank processes as on GPUs whose weights, rows and caches are FP8: transformers' tokens for the values."""

from __future__ import annotations

from ep_server.models.families import read_spec
from ep_server.models.footprint import footprint
from ep_server.models.sizes import Dtype
from ep_server.ranks.launcher import RankProcesses
from tests.support.models.fp8 import Fp8Tiny
from tests.support.ranks.rank_group import Recorder, greedy, rank_config

FP8_CACHE = "tests.support.ranks.interpreted_fp8_rank"


async def test_fp8_weights_rows_and_caches(fp8_tiny: Fp8Tiny) -> None:
    """Each rank keeps its experts as codes, dispatch brings codes, and the cache holds codes."""
    fp8 = {"model__dtype": "bfloat16", "exchange__payload": "fp8", "resilience__spare_slots": 0}
    config = rank_config(fp8_tiny.path, 2, scheduler__max_running=2, scheduler__max_step_tokens=8, **fp8)
    group, heard = RankProcesses(config, module=FP8_CACHE), Recorder()
    weights = footprint(read_spec(fp8_tiny.path), Dtype.BFLOAT16, packed=False)
    try:
        ready = await group.start(heard, heard.on_progress)
        assert tuple(rank.weight_bytes for rank in ready) == weights.rank_bytes((0, 0, 1, 1), 2)
        for number, prompt in enumerate(fp8_tiny.prompts, start=1):
            group.submit(number % 2, greedy(number, prompt, len(fp8_tiny.tokens[0])))
        await heard.until(lambda: len(heard.finished) == len(fp8_tiny.prompts), 120)
    finally:
        await group.stop()
    assert group.exit_codes == [0, 0]
    assert tuple(tuple(heard.tokens[number]) for number in (1, 2)) == fp8_tiny.tokens
