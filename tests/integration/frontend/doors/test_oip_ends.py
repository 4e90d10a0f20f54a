"""Who may call the Open Inference Protocol, when, and how long a call may take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import aio, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from ep_server.config import Config
from ep_server.frontend.server import Server
from ep_server.testing.fake_ranks import FakeRanks
from tests.support.doors.oip import message, outputs, tensors
from tests.support.frontend import MODEL, NO_TOKENIZER, WAIT, Code, failure, serving, trailers

LONG = 2000  # tokens, with logprobs: more than HTTP/2 lets through before the caller reads


async def held_open(*requests: Any) -> AsyncIterator[Any]:
    for request in requests:
        yield request
    await asyncio.sleep(WAIT)


async def test_a_stream_that_nobody_reads_ends() -> None:
    parameters = {"max_tokens": LONG, "ignore_eos": True, "logprobs": 20}
    request = message(input_ids=[1], stream=True, return_logprobs=True, sampling_parameters=parameters)
    options = [("grpc.http2.bdp_probe", 0)]  # else gRPC widens the window of a fast link
    async with (
        serving(model=NO_TOKENIZER, grpc__unread_seconds=0.2) as served,
        grpc.aio.insecure_channel(served.server.address, options=options) as channel,
    ):
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(held_open(request))
        await served.until(lambda: served.heard.admitted == 1)
        await served.until(lambda: served.server.engine.statistics().open_streams == 0)
        error = await failure(call)
        assert error.code() is Code.RESOURCE_EXHAUSTED and trailers(error)["epserver-error"] == "SlowReader"


async def test_open_streams_are_limited_even_without_requests() -> None:
    async with (
        serving(grpc__max_streams=1) as served,
        grpc.aio.insecure_channel(served.server.address) as channel,
    ):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        first = stub.ModelStreamInfer(held_open(message(text_input="")))
        assert (await first.read()).error_message.startswith("text_input")
        error = await failure(stub.ModelStreamInfer(held_open()))
        assert error.code() is Code.RESOURCE_EXHAUSTED and "grpc.max_streams = 1" in error.details()
        first.cancel()
        async with asyncio.timeout(WAIT):
            while (answer := await failure_of(stub)) is not None:
                assert answer is Code.RESOURCE_EXHAUSTED


async def failure_of(stub: Any) -> Any:
    """The status of a stream with one bad request, None for OK."""
    try:
        async for _ in stub.ModelStreamInfer(iter([message(text_input="")])):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


async def test_a_call_needs_a_token(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("secret")
    inputs = tensors(text_input="a", sampling_parameters={"max_tokens": 1})
    async with (
        serving(grpc__token_file=str(file)) as served,
        aio.InferenceServerClient(served.server.address) as client,
    ):
        with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
            await client.infer("fake", inputs)
        shown = {"authorization": "Bearer secret"}
        assert outputs(await client.infer("fake", inputs, headers=shown))["text_output"] == ["ab"]


async def test_the_server_is_ready_once_its_ranks_are() -> None:
    ranks = FakeRanks()
    ranks.start_gate = asyncio.Event()
    server = Server(Config.from_values({"grpc.port": 0, "grpc.drain_seconds": 0.0}), MODEL, ranks)
    starting = asyncio.create_task(server.start(lambda *_: None))
    try:
        async with asyncio.timeout(WAIT):
            while not server.address:
                await asyncio.sleep(0)
        async with aio.InferenceServerClient(server.address) as client:
            assert await client.is_server_live() and not await client.is_server_ready()
            assert not await client.is_model_ready("fake")
            [model] = (await client.get_model_repository_index()).models
            assert model.state == "UNAVAILABLE"
            with pytest.raises(InferenceServerException, match=r"UNAVAILABLE.*starting"):
                await client.infer("fake", tensors(text_input="a"))
            ranks.start_gate.set()
            await starting
            assert await client.is_server_ready() and await client.is_model_ready("fake")
    finally:
        await server.drain()
        await server.stop()
