"""Many requests at both nodes of a server at once, some dropped: the tokens of a request alone."""

from __future__ import annotations

import asyncio
import random
import signal

import pytest

from tests.support.cluster.nodes import WAIT, serving
from tests.support.fabric.fabric_ends import needs
from tests.support.raw_client import RawClient

NEW_TOKENS = 40
OPTIONS = ("--model-dtype", "float32", "--resilience-on-rank-loss", "stop")  # a node that stops ends both
ROUNDS, AT_ONCE = 4, 60
GREEDY = {"temperature": 0.0, "ignore_eos": True, "timeout": WAIT}


async def drop(client: RawClient, prompt: str) -> None:
    """Leaves a stream after a few messages."""
    call = client.generate(prompt, max_new_tokens=400, **GREEDY)
    for _ in range(4):
        await call.read()
    call.cancel()


@pytest.mark.slow
async def test_both_nodes_under_load_give_the_tokens_of_one_request() -> None:
    needs("system")
    choice = random.Random(1)
    prompts = [f"{choice.randrange(99)}+{choice.randrange(99)}=" for _ in range(12)]
    async with serving(ranks=2, options=OPTIONS) as servers:
        async with RawClient(servers[0].address) as first, RawClient(servers[1].address) as second:
            alone = {
                prompt: (await first.complete(prompt, max_new_tokens=NEW_TOKENS, **GREEDY)).token_ids
                for prompt in prompts
            }

            async def ask(number: int) -> None:
                client, prompt = (first, second)[number % 2], choice.choice(prompts)
                if number % 5 == 0:
                    await drop(client, prompt)
                else:
                    answer = await client.complete(prompt, max_new_tokens=NEW_TOKENS, **GREEDY)
                    assert answer.token_ids == alone[prompt]

            for _ in range(ROUNDS):
                await asyncio.gather(*map(ask, range(AT_ONCE)))
            async with asyncio.timeout(WAIT):
                while (loads := await second.loads()).in_flight:
                    pass
            steps = {rank.steps for rank in loads.ranks}
            assert len(loads.ranks) == 4 and all(steps)
        servers[1].signal(signal.SIGTERM)
        assert [await server.end() for server in servers] == [0, 0]
        assert [server.text for server in servers] == [[], []]
