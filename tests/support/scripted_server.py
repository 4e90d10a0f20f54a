"""A Decode service whose calls end as a script says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc import aio

from ep_server.v1 import decode_pb2, decode_pb2_grpc

INFO = decode_pb2.GenerateResponse(prompt_info=decode_pb2.PromptInfo(request_id="x"))
TOKENS = decode_pb2.GenerateResponse(tokens=decode_pb2.Tokens(token_ids=[7], text="seven"))
FINISHED = decode_pb2.GenerateResponse(finished=decode_pb2.Finished(reason=decode_pb2.FINISH_REASON_LENGTH))


@dataclass(frozen=True)
class End:
    """How a call ends: after `events`, with a status unless that is OK."""

    code: grpc.StatusCode = grpc.StatusCode.OK
    trailers: tuple[tuple[str, str], ...] = ()
    events: tuple[Any, ...] = ()


OK = End(events=(INFO, TOKENS, FINISHED))


@dataclass
class Scripted(decode_pb2_grpc.DecodeServicer):
    """One End per call; the last repeats."""

    script: list[End]
    address: str = ""
    timeouts: list[float | None] = field(default_factory=list)  # of the calls so far

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        end = self.script[min(len(self.timeouts), len(self.script) - 1)]
        self.timeouts.append(context.time_remaining())
        for event in end.events:
            yield event
        if end.code is not grpc.StatusCode.OK:
            await context.abort(end.code, "as the script says", end.trailers)


@asynccontextmanager
async def scripted(*script: End) -> AsyncIterator[Scripted]:
    server, service = aio.server(), Scripted(list(script))
    decode_pb2_grpc.add_DecodeServicer_to_server(service, server)
    service.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield service
    finally:
        await server.stop(0)
