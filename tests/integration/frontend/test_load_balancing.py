"""A stock gRPC channel over two servers, with the service config of the client page."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from grpc import aio

from ep_server.client import generate_request
from ep_server.v1 import decode_pb2_grpc
from tests.support.frontend import WAIT, rest, serving

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "clients.md"
(SERVICE_CONFIG,) = re.findall(r"^```json\n(\{\n  \"loadBalancing.*?)^```$", PAGE.read_text(), re.M | re.S)
CALLS = 8


async def test_calls_spread_and_leave_a_server_that_drains() -> None:
    async with serving() as first, serving() as second:
        target = "ipv4:" + ",".join(each.server.address for each in (first, second))
        async with (
            asyncio.timeout(2 * WAIT),
            aio.insecure_channel(target, options=[("grpc.service_config", SERVICE_CONFIG)]) as channel,
        ):
            stub = decode_pb2_grpc.DecodeStub(channel)

            async def call() -> None:
                request = generate_request([1], max_new_tokens=1)
                events = await rest(stub.Generate(request, wait_for_ready=True))
                assert events[-1].finished.usage.output_tokens == 1

            while not (first.heard.finished and second.heard.finished):
                await call()  # until both connections are up
            before = len(first.heard.finished), len(second.heard.finished)
            for _ in range(CALLS):
                await call()
            assert len(first.heard.finished) == before[0] + CALLS // 2
            assert len(second.heard.finished) == before[1] + CALLS // 2
            # Refused calls go to the other server; once health says so, there are none.
            await first.server.engine.drain(0)
            for _ in range(CALLS):
                await call()
            assert first.heard.refused
            first.server.health.set(serving=False)
            refused = -1
            while refused != len(first.heard.refused):
                refused = len(first.heard.refused)
                await call()
                await call()
            for _ in range(CALLS):
                await call()
            assert len(first.heard.refused) == refused
