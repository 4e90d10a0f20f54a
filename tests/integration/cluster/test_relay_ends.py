"""Every way in which a call at a node that does not lead can end, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from ep_server.client import generate_request
from ep_server.cluster.security import token_metadata
from ep_server.config import ClusterConfig, GrpcConfig
from ep_server.errors import Draining
from ep_server.v1.decode_pb2_grpc import DecodeStub
from tests.support.cluster.relay import relayed, relaying
from tests.support.frontend import NO_TOKENIZER, WAIT, Code, failure, logged, next_event, rest, trailers
from tests.support.raw_client import RawClient


async def test_a_caller_that_leaves_frees_its_request() -> None:
    async with relayed() as both:
        both.ranks.hold()
        call = both.node.client.generate([1], max_new_tokens=50_000)
        for _ in range(3):
            both.ranks.step()
            await next_event(call)
        call.cancel()
        await both.served.until(lambda: both.ranks.cancelled == [1])
        both.ranks.release()
        await both.served.idle()
        assert [summary.status for summary in both.served.heard.finished] == ["CANCELLED"]
        await both.served.until(lambda: both.node.heard.ended == ["CANCELLED"])
        assert both.node.relay.open_streams == 0


async def test_a_caller_that_loses_its_connection_frees_its_request() -> None:
    async with relayed() as both:
        both.ranks.hold()
        await next_event(both.node.client.generate([1]))
        await both.node.client.close()
        await both.served.until(lambda: both.ranks.cancelled == [1])
        both.ranks.release()


async def test_an_abort_at_any_node_ends_a_stream_of_another() -> None:
    async with relayed() as both:
        both.ranks.hold()
        near, far = (c.generate([1], request_id=name) for c, name in both_clients(both))
        await next_event(near), await next_event(far)
        assert list((await both.node.client.abort("near", "none")).aborted) == ["near"]
        assert list((await both.served.client.abort("far")).aborted) == ["far"]
        for call, name in ((near, "near"), (far, "far")):
            error = await failure(call)
            assert error.code() is Code.CANCELLED
            assert error.details() == f"request '{name}' was aborted"
        both.ranks.release()


def both_clients(both: Any) -> list[tuple[RawClient, str]]:
    return [(both.served.client, "near"), (both.node.client, "far")]


async def test_deadlines_of_the_call_and_of_the_request() -> None:
    async with relayed() as both:
        both.ranks.hold()
        for fields in ({"timeout": 0.2}, {"deadline_ms": 200}):
            admitted = both.served.heard.admitted
            while both.served.heard.admitted == admitted:  # again if it passed on the way
                error = await failure(both.node.client.generate([1], **fields))
                assert error.code() is Code.DEADLINE_EXCEEDED
        await both.served.until(lambda: len(both.served.heard.finished) == both.served.heard.admitted)
        assert {summary.status for summary in both.served.heard.finished} <= {
            "DEADLINE_EXCEEDED",
            "CANCELLED",
        }
        both.ranks.release()


async def test_a_reader_that_stops_reading_is_cancelled_by_the_leader() -> None:
    """Flow control fills up hop by hop; the tokens then wait at the leader until its buffer is full."""
    async with relayed(grpc__stream_buffer=64, model=NO_TOKENIZER) as both:
        call = both.node.client.generate([1], output_logprobs=True, top_n=20)
        await next_event(call)
        await both.served.until(lambda: both.served.heard.finished != [])
        assert both.served.heard.finished[0].status == "RESOURCE_EXHAUSTED"
        error = await failure(call)
        assert error.code() is Code.RESOURCE_EXHAUSTED and trailers(error)["epserver-error"] == "SlowReader"
        await both.served.until(lambda: both.node.heard.ended == ["RESOURCE_EXHAUSTED"])


async def test_a_caller_that_reads_nothing_is_ended_by_its_node() -> None:
    """The output has left the leader, or waits on the way: the node that holds the call ends it."""
    limits = GrpcConfig(port=0, unread_seconds=0.2)
    request = generate_request([1], output_logprobs=True, top_n=20, max_new_tokens=4000)
    async with relayed(grpc=limits, model=NO_TOKENIZER) as both:
        options = [("grpc.http2.bdp_probe", 0)]  # else gRPC widens the window of a fast link
        async with aio.insecure_channel(both.node.client.target.address, options=options) as channel:
            call = DecodeStub(channel).Generate(request)
            await both.served.until(lambda: both.node.heard.ended == ["RESOURCE_EXHAUSTED"])
            assert both.node.relay.open_streams == 0
            error = await failure(call)
        assert error.code() is Code.RESOURCE_EXHAUSTED and "grpc.unread_seconds = 0.2" in error.details()


async def test_lost_rank_ends_relayed_streams_with_leader_message() -> None:
    async with relayed() as both:
        both.ranks.hold()
        call = both.node.client.generate([1])
        await next_event(call)
        both.ranks.kill(4, "exit code -9")
        error = await failure(call)
        assert error.code() is Code.UNAVAILABLE and "rank 4" in (error.details() or "")
        refused = await failure(both.node.client.generate([1]))
        assert refused.code() is Code.UNAVAILABLE and trailers(refused)["epserver-error"] == "RankLost"


async def test_draining_leader_refuses_calls_and_finishes_streams() -> None:
    async with relayed() as both:
        both.ranks.hold()
        call = both.node.client.generate([1], max_new_tokens=5)
        await next_event(call)
        draining = asyncio.create_task(both.served.server.engine.drain(WAIT))
        await asyncio.sleep(0)
        refused = await failure(both.node.client.generate([1]))
        assert trailers(refused)["epserver-error"] == Draining.__name__
        both.ranks.release()
        assert (await rest(call))[-1].finished.usage.output_tokens == 5
        assert await draining


async def test_a_leader_that_is_not_there() -> None:
    async with relaying("127.0.0.1:1") as node:
        for call in (node.client.generate([1]), node.client.loads()):
            error = await failure(call)
            assert error.code() is Code.UNAVAILABLE
            assert (error.details() or "").startswith("node 0 at 127.0.0.1:1 cannot be reached: ")
            assert trailers(error)["epserver-error"] == "Unavailable"
        assert node.heard.ended == ["UNAVAILABLE"]


async def test_a_leader_that_goes_away_under_a_stream() -> None:
    async with relayed() as both:
        both.ranks.hold()
        call = both.node.client.generate([1])
        await next_event(call)
        await both.for_nodes.server.stop(None)
        error = await failure(call)
        assert error.code() is Code.UNAVAILABLE and "node 0 at" in (error.details() or "")
        await both.served.until(lambda: both.node.heard.ended == ["UNAVAILABLE"])  # what the caller was told
        both.ranks.release()


async def test_the_end_of_the_link_ends_calls_and_refuses_new_ones() -> None:
    async with relayed() as both:
        both.ranks.hold()
        call = both.node.client.generate([1])
        await next_event(call)
        both.node.relay.end("node 0 is silent")
        both.node.relay.end("a later word")
        for ended in (call, both.node.client.generate([1]), both.node.client.loads()):
            error = await failure(ended)
            assert (error.code(), error.details()) == (Code.UNAVAILABLE, "node 0 is silent")
        assert both.node.heard.ended == ["UNAVAILABLE"] and both.node.heard.refused == ["UNAVAILABLE"]
        await both.node.relay.closed(WAIT)
        both.ranks.release()
        await both.served.idle()
        assert [summary.status for summary in both.served.heard.finished] == ["CANCELLED"]


async def test_calls_in_flight_get_the_final_status_of_the_server() -> None:
    async with relayed() as both:
        both.ranks.hold()
        call = both.node.client.generate([1], max_new_tokens=3)
        await next_event(call)
        both.node.relay.refuse("the server has ended")
        error = await failure(both.node.client.loads())
        assert (error.code(), error.details()) == (Code.UNAVAILABLE, "the server has ended")
        both.ranks.release()
        assert (await rest(call))[-1].finished.usage.output_tokens == 3


async def test_a_leader_of_another_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "token").write_text("ours\n")
    async with relayed(cluster_token=(str(tmp_path / "token"), "ours")) as both:
        assert (await both.node.client.complete([1], max_new_tokens=1)).token_ids == [2]
    async with relayed(cluster_token=(str(tmp_path / "token"), "theirs")) as both:
        error = await failure(both.node.client.generate([1]))
        assert error.code() is Code.UNAVAILABLE and "does not know this node" in (error.details() or "")
        assert "cluster.token_file of node 1" in caplog.text and both.ranks.requests == {}


async def test_a_node_whose_token_is_away_is_unavailable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "token"
    token.write_text("ours\n")
    shown = token_metadata(ClusterConfig(token_file=str(token)))
    async with relayed(cluster_token=(str(token), shown)) as both:
        assert (await both.node.client.complete([1], max_new_tokens=1)).token_ids == [2]
        token.unlink()
        for call in (both.node.client.generate([1]), both.node.client.loads()):
            assert (await failure(call)).code() is Code.UNAVAILABLE
        (error,) = logged(caplog, logging.ERROR)
        assert error.startswith("cluster.token_file = ")
        assert both.node.heard.ended[1:] == ["UNAVAILABLE"]
        token.write_text("ours\n")
        assert (await both.node.client.complete([1], max_new_tokens=1)).token_ids == [2]
