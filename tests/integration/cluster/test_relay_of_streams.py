"""Calls with a stream of requests at a node that does not lead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from tritonclient.grpc import aio, service_pb2_grpc

from ep_server.config import GrpcConfig
from tests.support.cluster.relay import relayed
from tests.support.doors.oip import message, outputs, streamed, tensors
from tests.support.frontend import WAIT, Code, failure, trailers


async def test_a_stream_of_requests_is_the_leaders() -> None:
    requests = [
        {
            "request_id": str(tokens),
            "inputs": tensors(text_input="ab", sampling_parameters={"max_tokens": tokens}),
        }
        for tokens in (5, 0, 7)
    ]
    async with relayed() as both:
        seen = []
        for address in (both.served.server.address, both.node.client.target.address):
            async with aio.InferenceServerClient(address) as client:
                pairs = await streamed(client, *requests)
                errors = sorted(str(error) for _, error in pairs if error)
                texts = {r.get_response().id: outputs(r) for r, error in pairs if not error}
                seen.append((errors, texts))
        assert seen[0] == seen[1] and len(seen[0][1]) == 2
        await both.served.until(lambda: both.node.heard.ended == ["OK"])


async def test_leaving_cancels_the_requests_at_the_leader() -> None:
    async def requests() -> AsyncIterator[Any]:
        yield message(text_input="a", stream=True, sampling_parameters={"max_tokens": 1000})
        await asyncio.sleep(WAIT)

    async with relayed() as both, grpc.aio.insecure_channel(both.node.client.target.address) as channel:
        both.ranks.hold()
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(requests())
        engine = both.served.server.engine
        await both.served.until(lambda: engine.statistics().in_flight == 1)
        call.cancel()
        await both.served.until(lambda: engine.statistics().open_streams == 0)
        both.ranks.release()
        await both.served.idle()
        await both.served.until(lambda: both.node.heard.ended == ["CANCELLED"])


async def test_the_relay_limits_each_message() -> None:
    config = GrpcConfig(port=0, max_message_bytes=1 << 16)
    async with (
        relayed(grpc=config) as both,
        grpc.aio.insecure_channel(both.node.client.target.address) as channel,
    ):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        error = await failure(stub.ModelStreamInfer(iter([message(text_input="x" * (1 << 16))])))
        assert error.code() is Code.RESOURCE_EXHAUSTED and "at most 65536" in error.details()
        assert trailers(error)["epserver-error"] == "MessageTooLarge"
