"""Requests from a process in the network namespace of a node."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.cluster.nodes import WAIT, Nodes


class Asked:
    """Requests on their way from a process in the namespace of a node."""

    def __init__(self, inner: asyncio.subprocess.Process) -> None:
        self._inner = inner

    async def began(self) -> None:
        """Until a token of each has come."""
        assert self._inner.stderr is not None
        async with asyncio.timeout(WAIT):
            while (line := await self._inner.stderr.readline()) != b"began\n":
                assert line

    async def answers(self) -> list[tuple[list[int], int, str]]:
        """In the order of the requests: token ids, rank, how the stream ended."""
        assert self._inner.stdout is not None
        async with asyncio.timeout(WAIT):
            answers = json.loads(await self._inner.stdout.read())
            await self._inner.wait()
        return [(tokens, rank, end) for tokens, rank, end in answers]


@asynccontextmanager
async def asked(made: Nodes, node: int, requests: list[dict[str, Any]]) -> AsyncIterator[Asked]:
    """node: whose port is asked, from its own namespace."""
    pipe = asyncio.subprocess.PIPE
    inner = await asyncio.create_subprocess_exec(
        *(*made.prefix(node), sys.executable, "-m", "tests.support.cluster.ask_server"),
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
    )
    try:
        assert inner.stdin is not None
        inner.stdin.write(json.dumps({"address": made.started[node].address, "requests": requests}).encode())
        inner.stdin.close()
        yield Asked(inner)
    finally:
        if inner.returncode is None:
            inner.kill()
            await inner.wait()
