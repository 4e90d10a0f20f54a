"""Asks a server from the network namespace that this process was started in: JSON in, JSON out.

In: {"address": host:port, "requests": [keywords of RawClient.generate, and prompt]}. Out, in their order:
[token ids, rank, how the stream ended]. Says "began" on standard error when a token of each has come.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from grpc import aio

from tests.support.raw_client import RawClient


async def ask(client: RawClient, fields: dict[str, Any], began: asyncio.Event) -> tuple[list[int], int, str]:
    tokens, rank = [], -1
    try:
        async for event in client.generate(fields.pop("prompt"), **fields):
            kind = event.WhichOneof("event")
            if kind == "prompt_info":
                rank = event.prompt_info.rank
            elif kind == "tokens":
                tokens += event.tokens.token_ids
                began.set()
    except aio.AioRpcError as error:
        return tokens, rank, f"{error.code().name}: {error.details()}"
    return tokens, rank, "OK"


async def main() -> None:
    job = json.loads(sys.stdin.read())
    events = [asyncio.Event() for _ in job["requests"]]
    async with RawClient(job["address"]) as client:
        asks = [ask(client, fields, began) for fields, began in zip(job["requests"], events, strict=True)]
        answers = asyncio.gather(*asks)
        await asyncio.wait(
            (answers, asyncio.gather(*(e.wait() for e in events))), return_when="FIRST_COMPLETED"
        )
        print("began", file=sys.stderr, flush=True)
        print(json.dumps(await answers))


asyncio.run(main())
