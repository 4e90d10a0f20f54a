"""Control, health and reflection: what a server says of itself."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ep_server.testing.fake_ranks import LIMITS, FakeRanks
from ep_server.v1 import control_pb2 as pb
from tests.support.frontend import MODEL, Code, failure, next_event, serving

SERVING, NOT_SERVING, UNKNOWN = 1, 2, 3


async def test_server_info() -> None:
    async with serving(FakeRanks(2), scheduler__max_queue=7) as served:
        info = await served.client.server_info()
        assert info.api_version == "ep_server.v1" and info.version
        assert info.state == pb.SERVER_STATE_SERVING
        assert (info.ranks, info.max_queue, info.max_running) == (2, 7, 128)
        assert info.kv_blocks == 2 * LIMITS.kv_blocks and info.kv_block_size == 16
        assert info.max_context == MODEL.max_context
        assert [(r.rank, r.weight_bytes, r.exchange_bytes) for r in info.rank_info] == [
            (0, 1 << 20, 1 << 22),
            (1, 1 << 20, 1 << 22),
        ]
        again = await served.client.server_info()
        assert again.instance_id == info.instance_id and again.uptime_seconds >= info.uptime_seconds
    async with serving() as served:
        assert (await served.client.server_info()).instance_id != info.instance_id


async def test_model_info() -> None:
    async with serving() as served:
        info = await served.client.model_info()
        assert (info.name, info.architecture, info.vocab_size) == ("fake", "fake_moe", 257)
        assert list(info.eos_token_ids) == [256] and info.has_tokenizer
        assert (info.default_temperature, info.default_top_k, info.default_top_p) == (0.5, 40, 1.0)
        assert (info.num_experts, info.experts_per_token) == (8, 2)


async def test_loads() -> None:
    async with serving(FakeRanks(2)) as served:
        empty = await served.client.loads()
        assert [(r.rank, r.running, r.kv_blocks_total) for r in empty.ranks] == [(0, 0, 4096), (1, 0, 4096)]
        served.ranks.hold()
        calls = [served.client.generate([n], max_new_tokens=2) for n in range(3)]
        for call in calls:
            await next_event(call)
        loads = await served.client.loads()
        assert (loads.in_flight, loads.waiting) == (3, 3)
        served.ranks.step()
        loads = await served.client.loads()
        assert (loads.in_flight, loads.waiting) == (3, 0)
        served.ranks.release()
        await served.until(lambda: len(served.server.engine.rank_statistics) == 2)
        loads = await served.client.loads()
        assert loads.in_flight == 0
        assert all(rank.steps >= 2 and rank.prefix_queries >= 1 for rank in loads.ranks)


async def test_ep_state() -> None:
    async with serving(FakeRanks(2)) as served:
        for rank in (0, 1):
            await served.client.complete([1], max_new_tokens=10, dp_rank=rank)
        await served.until(lambda: len(served.server.engine.rank_statistics) == 2)
        state = await served.client.ep_state()
        assert [(rank.rank, rank.up) for rank in state.ranks] == [(0, True), (1, True)]
        steps = sum(rank.steps for rank in state.ranks)
        latencies = {(entry.op, entry.part): entry for entry in state.latencies}
        dispatch = latencies["dispatch", "wait"]
        assert dispatch.count == steps
        assert dispatch.mean_seconds == pytest.approx(20e-6)
        for quantile in (dispatch.p50_seconds, dispatch.p90_seconds, dispatch.p99_seconds):
            assert 2**14 * 1e-9 <= quantile <= 2**15 * 1e-9
        assert {(w.op, w.rank, w.peer) for w in state.peer_waits} == {("dispatch", 0, 1), ("dispatch", 1, 0)}
        assert sum(w.wait_seconds for w in state.peer_waits) == pytest.approx(steps * 1e-6)
        assert dict(state.expert_balance.expert_tokens) == {0: 10, 1: 10}
        assert state.expert_balance.rank_balance == 1.0


async def test_ep_state_of_a_lost_group() -> None:
    async with serving(FakeRanks(2)) as served:
        served.ranks.kill(0)
        state = await served.client.ep_state()
        assert [rank.up for rank in state.ranks] == [False, False]
        assert (await served.client.server_info()).state == pb.SERVER_STATE_LOST


async def test_abort_takes_so_many_ids() -> None:
    async with serving() as served:
        error = await failure(served.client.abort(*map(str, range(1025))))
        assert error.code() is Code.INVALID_ARGUMENT and "1025 ids" in error.details()


async def test_health_check() -> None:
    async with serving() as served:
        for name in ("", "ep_server.v1.Decode", "ep_server.v1.Control"):
            assert await served.client.serving(name)
        error = await failure(served.client.serving("nobody"))
        assert error.code() is Code.NOT_FOUND
        served.server.health.set(serving=False)
        assert not await served.client.serving("ep_server.v1.Control") and not await served.client.serving()
        assert await served.client.serving("")  # the process works


async def test_health_watch_stays_open_and_hears_every_change() -> None:
    async with serving() as served:

        def watch(name: str) -> object:
            return served.client.health.Watch(health_pb2.HealthCheckRequest(service=name))

        process = watch("")
        assert (await next_event(process)).status == SERVING
        calls = [watch(f"ep_server.v1.{name}") for name in ("Decode", "Control", "Decode")]
        for call in calls:
            assert (await next_event(call)).status == SERVING
        calls.pop().cancel()  # one watcher that leaves does not take the others with it
        unknown = watch("nobody")
        assert (await next_event(unknown)).status == UNKNOWN
        served.server.health.set(serving=False)
        for call in calls:
            assert (await next_event(call)).status == NOT_SERVING
        served.server.health.set(serving=True)
        for call in calls:
            assert (await next_event(call)).status == SERVING
        silent = asyncio.ensure_future(unknown.read())
        served.server.health.set(serving=True)  # no change: no message
        assert await served.client.serving()
        assert not silent.done()
        silent.cancel()
        served.server.health.fail()
        for call in (*calls, process):  # the first word to `process` since it began
            assert (await next_event(call)).status == NOT_SERVING
        served.server.health.set(serving=True)
        assert not await served.client.serving() and not await served.client.serving("")


async def test_reflection_lists_and_describes_the_services() -> None:
    async with serving() as served:
        stub = reflection_pb2_grpc.ServerReflectionStub(served.client.channel)
        ask = reflection_pb2.ServerReflectionRequest
        requests = [ask(list_services=""), ask(file_containing_symbol="ep_server.v1.Decode")]
        listed, described = [answer async for answer in stub.ServerReflectionInfo(iter(requests))]
        names = {service.name for service in listed.list_services_response.service}
        assert names == {
            "ep_server.v1.Decode",
            "ep_server.v1.Control",
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
            "inference.GRPCInferenceService",
            "vllm.grpc.engine.VllmEngine",
        }
        (file,) = described.file_descriptor_response.file_descriptor_proto
        parsed = descriptor_pb2.FileDescriptorProto.FromString(file)
        assert parsed.name == "ep_server/v1/decode.proto"
