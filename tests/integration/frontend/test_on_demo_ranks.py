"""The Decode service on rank processes of the demo model, with transformers as the oracle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pytest
import pytest_asyncio
import torch

import ep_server
from ep_server.config import Config
from ep_server.frontend.served_model import ServedModel
from ep_server.frontend.server import Server
from ep_server.ranks.launcher import RankProcesses
from tests.support.frontend import WAIT, parked
from tests.support.raw_client import RawClient

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = Path(ep_server.__file__).parent / "assets" / "demo_model"
BLOCK = 4
TOLERANCE = 1e-3  # of sums in another order, behind three layers
PROMPT = [(5 * n + n * n) % 13 for n in range(70)]


@dataclass
class Demo:
    """A server on two ranks, and a client of it."""

    server: Server
    client: RawClient

    async def tokens_run(self) -> int:
        """Tokens that rank 0 ran, once both ranks have parked."""
        await parked(self.server)
        return self.server.engine.rank_statistics[0].counters["tokens"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def demo() -> AsyncIterator[Demo]:
    values = {
        "grpc.port": 0,
        "model.path": str(MODEL),
        "model.dtype": "float32",
        "parallel.ranks": 2,
        "parallel.threads_per_rank": 1,
        "scheduler.block_size": BLOCK,
        "scheduler.kv_blocks": 256,
        "scheduler.max_step_tokens": 32,
        "scheduler.max_running": 16,
    }
    config = Config.from_values(values)
    server = Server(config, ServedModel.load(config.model), RankProcesses(config))
    await server.start(lambda *_: None)
    try:
        async with RawClient(server.address) as client:
            yield Demo(server, client)
    finally:
        await server.drain()
        await server.stop()


@pytest.mark.parametrize("overrides", [{}, {"temperature": 0.3, "logit_bias": {3: 50.0}, "num_sequences": 2}])
async def test_prompt_logprobs_are_those_of_transformers(demo: Demo, overrides: dict[str, object]) -> None:
    """In chunks of at most 32 tokens; how tokens are drawn does not matter."""
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.inference_mode():
        logits = reference(torch.tensor([PROMPT])).logits[0, :-1]
    expected = logits.log_softmax(-1)
    output = await demo.client.complete(
        PROMPT, prompt_logprobs=3, max_new_tokens=4, seed=1, timeout=WAIT, **overrides
    )
    assert len(output.prompt_logprobs) == len(PROMPT) - 1
    for row, token, entry in zip(expected, PROMPT[1:], output.prompt_logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
        best = row.topk(3).values.tolist()
        assert [top.logprob for top in entry.top] == pytest.approx(best, abs=TOLERANCE)
        assert [float(row[top.token_id]) for top in entry.top] == pytest.approx(best, abs=TOLERANCE)


async def test_steps_are_those_of_the_trace(demo: Demo) -> None:
    """A token drawn alone is of one step of its rank, and the next token of the next step.

    A busy machine reads tokens of several steps at once: they are one message, of the last step.
    """
    call = demo.client.generate(PROMPT[:20], dp_rank=1, max_new_tokens=6, ignore_eos=True, timeout=WAIT)
    found = [event.tokens async for event in call if event.HasField("tokens")]
    first = found[0].step - len(found[0].token_ids) + 1
    steps = list(range(first, first + 6))
    counts = accumulate(len(tokens.token_ids) for tokens in found)
    assert [tokens.step for tokens in found] == [steps[count - 1] for count in counts]
    traced: dict[int, int] = {}
    async with asyncio.timeout(WAIT):  # ranks report when they park
        while steps[-1] not in traced:
            traces = (await demo.client.diagnostics()).steps
            traced = {trace.step: trace.tokens for trace in traces if trace.rank == 1}
            await asyncio.sleep(0.01)
    assert [traced[step] for step in steps] == [20, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("options", [{"cache_salt": "n"}, {"bypass_prefix_cache": True}])
async def test_sequences_share_one_prefill(demo: Demo, options: dict[str, object]) -> None:
    """With the tokens that each has alone, by its seed."""
    count, new, full = 8, 12, (len(PROMPT) - 1) // BLOCK * BLOCK
    fields = {"temperature": 1.5, "max_new_tokens": new, "ignore_eos": True, "dp_rank": 0, "timeout": WAIT}
    alone = [
        (await demo.client.complete(PROMPT, seed=7 + n, bypass_prefix_cache=True, **fields)).token_ids
        for n in range(count)
    ]
    before = await demo.tokens_run()
    output = await demo.client.complete(PROMPT, seed=7, num_sequences=count, **options, **fields)
    outputs = [output, *output.others]
    assert [each.token_ids for each in outputs] == alone
    assert [each.finished.usage.cached_tokens for each in outputs] == [0] + [full] * (count - 1)
    ran = await demo.tokens_run() - before
    assert ran == len(PROMPT) + (count - 1) * (len(PROMPT) - full) + count * (new - 1)


async def test_a_session_reuses_prompt_and_output_of_its_salt(demo: Demo) -> None:
    """Each turn continues the last one's prompt and output; another salt finds nothing of it."""
    fields = {"max_new_tokens": 17, "ignore_eos": True, "dp_rank": 0, "temperature": 0.0, "timeout": WAIT}
    history, known = PROMPT[:30], 0
    for turn in range(3):
        mine = await demo.client.complete(history, cache_salt="user 1", **fields)
        other = await demo.client.complete(history, cache_salt=f"user {turn + 2}", **fields)
        assert mine.finished.usage.cached_tokens == known // BLOCK * BLOCK
        assert other.finished.usage.cached_tokens == 0
        assert mine.token_ids == other.token_ids
        history = history + mine.token_ids
        known = len(history) - 1  # the last token was drawn, not run
        history = [*history, turn, 3, 1]
