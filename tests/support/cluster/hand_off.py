"""Hands prompts off between two servers, from the network namespace that this process was started in.

In, as JSON: {"prefill": host:port, "decode": [host:port of each node], "prompts": [token ids],
"ranks": of each server, "fields": of every request}. Out, for each pair of a prefill and a decode rank:
{"alone": the tokens of the decode server by itself, "tokens": those with the hand-off, "fetched": tokens of
the prompt that were not computed, "address": of the handle}. Prompts and decode nodes take turns.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from itertools import cycle, product
from typing import Any

from tests.support.raw_client import RawClient


async def main() -> None:
    job = json.loads(sys.stdin.read())
    found: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(RawClient(job["prefill"]))
        doors = [await stack.enter_async_context(RawClient(address)) for address in job["decode"]]
        nodes, prompts, fields = cycle(doors), cycle(job["prompts"]), job["fields"]
        for first, second in product(range(job["ranks"]), repeat=2):
            prompt, decode = next(prompts), next(nodes)
            common = {"bypass_prefix_cache": True, "timeout": 60, **fields}
            alone = await decode.complete(prompt, dp_rank=second, **common)
            held = await prefill.complete(
                prompt, dp_rank=first, timeout=60, max_new_tokens=1, hold_kv=True, bypass_prefix_cache=True
            )
            output = await decode.complete(prompt, dp_rank=second, kv_handle=held.kv_handle, **common)
            found.append(
                {
                    "alone": alone.token_ids,
                    "tokens": output.token_ids,
                    "fetched": output.finished.usage.cached_tokens,
                    "address": held.kv_handle.address,
                }
            )
    print(json.dumps(found))


asyncio.run(main())
