"""Hands prompts off between two servers, from the network namespace that this process was started in.

In, as JSON: {"prefill": host:port, "decode": [host:port of each node], "prompts": [token ids],
"ranks": of each server, "fields": of every request, "metrics": URL of decode node 0}. Out, "pairs": for each
pair of ranks {"alone": the tokens of the decode server by itself, "tokens": those with the
hand-off, "fetched": tokens of the prompt that were not computed, "address": of the handle}; "paths": how many
fetches moved through what. Prompts and decode nodes take turns.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.request
from collections import Counter
from contextlib import AsyncExitStack
from itertools import cycle, product
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.raw_client import RawClient

WAIT = 60.0


def paths(url: str, least: int) -> dict[str, int]:
    """Fetches by path over all ranks, once they have reported so many."""
    end = time.monotonic() + WAIT
    while True:
        found = Counter[str]()
        with urllib.request.urlopen(url, timeout=WAIT) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        for family in families:
            for sample in family.samples:
                if sample.name == "epserver_kv_handoff_fetches_total":
                    found[sample.labels["path"]] += int(sample.value)
        if found.total() >= least or time.monotonic() > end:
            return dict(found)
        time.sleep(0.2)


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
    print(json.dumps({"pairs": found, "paths": paths(job["metrics"], len(found))}))


asyncio.run(main())
