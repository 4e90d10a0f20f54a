"""The port of a node that does not lead: its limits, tokens and services; and which ranks its calls go to."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ep_server.client import Target, generate_request
from ep_server.config import GrpcConfig
from ep_server.testing.fake_ranks import FakeRanks
from tests.support.certificates import make_certificates
from tests.support.cluster.relay import NODE, RANKS, relayed
from tests.support.frontend import WAIT, Code, failure, next_event, rest, trailers
from tests.support.raw_client import RawClient

OWN_RANKS = set(range(NODE * RANKS, (NODE + 1) * RANKS))


async def test_streams_count_against_the_limit_of_the_node() -> None:
    async with relayed(grpc=GrpcConfig(port=0, max_streams=2)) as both:
        both.ranks.hold()
        calls = [both.node.client.generate([1]) for _ in range(2)]
        for call in calls:
            await next_event(call)
        error = await failure(both.node.client.generate([1]))
        assert error.code() is Code.RESOURCE_EXHAUSTED and "grpc.max_streams = 2" in (error.details() or "")
        assert int(trailers(error)["grpc-retry-pushback-ms"]) > 0
        assert (await both.node.client.loads()).in_flight == 2  # other calls go on
        assert both.node.heard.refused == ["RESOURCE_EXHAUSTED"] and both.served.heard.refused == []
        calls[0].cancel()
        await both.served.until(lambda: both.node.relay.open_streams == 1)
        third = both.node.client.generate([1])
        await next_event(third)
        for call in (calls[1], third):
            call.cancel()
        both.ranks.release()


async def test_token_and_tls_are_the_nodes_own(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    (tmp_path / "tokens").write_text("caller\n")
    grpc_config = GrpcConfig(
        port=0,
        tls_cert=str(made / "server.pem"),
        tls_key=str(made / "server.key"),
        token_file=str(tmp_path / "tokens"),
    )
    target = Target("", tls_ca=str(made / "ca.pem"), token="caller")
    async with relayed(grpc=grpc_config, target=target) as both:
        assert (await both.node.client.complete([1], max_new_tokens=1)).token_ids == [2]
        assert await both.node.client.serving()  # probes carry no token
        stranger = dataclasses.replace(both.node.client.target, token="leader")
        async with RawClient(stranger) as client:
            for call in (client.generate([1]), client.loads()):
                assert (await failure(call)).code() is Code.UNAUTHENTICATED
        assert len(both.ranks.requests) == 1


async def test_reflection_and_health_answer_here() -> None:
    async with relayed() as both:
        answers = []
        for client in (both.served.client, both.node.client):
            stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
            ask = reflection_pb2.ServerReflectionRequest
            asked = [ask(list_services=""), ask(file_containing_symbol="ep_server.v1.Control")]
            answers.append([answer async for answer in stub.ServerReflectionInfo(iter(asked))])
            assert await client.serving("ep_server.v1.Decode") and await client.serving()
        assert answers[0] == answers[1]


async def test_calls_go_to_the_ranks_of_the_node_they_came_to() -> None:
    async with relayed() as both:
        for _ in range(2):
            assert (await both.node.client.complete([1], max_new_tokens=2)).info.rank in OWN_RANKS
            assert (await both.served.client.complete([1], max_new_tokens=2)).info.rank in {0, 1}
            await both.served.idle()


async def test_many_calls_at_one_node_reach_every_rank() -> None:
    async with relayed() as both:
        both.ranks.hold()
        calls, ranks = [], []
        for _ in range(24):
            calls.append(both.node.client.generate([1] * 100, max_new_tokens=1))
            ranks.append((await next_event(calls[-1])).prompt_info.rank)
        assert {ranks[0], ranks[1]} == OWN_RANKS and set(ranks) == set(range(6))
        assert all(ranks.count(rank) >= 3 for rank in range(6))
        both.ranks.release()
        await asyncio.gather(*map(rest, calls))


async def test_a_wish_reaches_any_rank_of_any_node() -> None:
    async with relayed() as both:
        for rank in range(6):
            assert (await both.node.client.complete([1], max_new_tokens=1, dp_rank=rank)).info.rank == rank


async def test_nobody_claims_to_be_a_node() -> None:
    async with relayed() as both:
        for client, ranks in ((both.served.client, {0, 1}), (both.node.client, OWN_RANKS)):
            for claim in ("2", "99", "x"):
                request = generate_request([1], max_new_tokens=1)
                events = await rest(client.decode.Generate(request, metadata=(("epserver-node", claim),)))
                assert events[0].prompt_info.rank in ranks
                await both.served.idle()


async def test_one_node_takes_the_header_for_nothing() -> None:
    async with relayed(FakeRanks(3), cluster__nodes=1, parallel__ranks=3) as both:
        assert (await both.node.client.complete([1], max_new_tokens=1)).info.rank == 0


async def test_many_streams_at_once_with_some_that_leave() -> None:
    async with relayed() as both:

        async def one(number: int) -> None:
            call = both.node.client.generate([number], max_new_tokens=30, output_text=False)
            if number % 5 == 0:
                await next_event(call)
                call.cancel()
                return
            ids = [i for event in await rest(call) for i in event.tokens.token_ids]
            assert ids == [(number + 1 + i) % 256 for i in range(30)]

        async with asyncio.timeout(WAIT):
            await asyncio.gather(*(one(number) for number in range(1, 121)))
        await both.served.idle()
        await both.node.relay.closed(WAIT)
        assert both.node.heard.began == 120 == len(both.node.heard.ended)
        both.ranks.check_integrity(idle=True)
