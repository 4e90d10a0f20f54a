"""Callers and servers that go away, handles that are wrong: the right tokens or a clear error, and no leak.

Holds last far longer than the tests: blocks that are free again were freed by what happened.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
import pytest_asyncio
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from ep_server.client import AsyncClient, PrefillDecode
from ep_server.errors import InvalidArgument
from ep_server.records import TokenEvent
from ep_server.scheduler.handoffs import HoldEnd
from ep_server.v1 import decode_pb2
from tests.support.frontend import WAIT, Code, failure, parked
from tests.support.handoff.servers import (
    Running,
    continued,
    counted,
    held,
    nothing_held,
    pair,
    serving,
    used,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
LENGTH = 75
GREEDY: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True, "temperature": 0.0}
HOLD = {"handoff__hold_seconds": 10 * WAIT}
PATIENT = {"handoff__silence_seconds": 60.0, "handoff__stall_seconds": 60.0}  # with a busy machine
MOMENTS = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1)
MANY = 20  # times a prompt: its prefill takes longer than the reports that show it

Pair = tuple[Running, Running]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[Pair]:
    """No block size divides the other."""
    first = {"parallel__ranks": 2, "scheduler__block_size": 5, **PATIENT, **HOLD}
    async with pair(first, {"scheduler__block_size": 7, **PATIENT}) as both:
        yield both


def prompt(number: int) -> list[int]:
    """Nobody has it in the prefix cache."""
    digits = [number // 169, number // 13 % 13, number % 13]
    return [*digits, *((5 * n + n * n) % 13 for n in range(3, LENGTH))]


async def alone(server: Running, ids: list[int]) -> list[int]:
    output = await server.client.complete(ids, timeout=WAIT, bypass_prefix_cache=True, **GREEDY)
    return output.token_ids


async def test_a_prefill_dropped_before_its_end_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving("prefill", scheduler__max_step_tokens=1, **HOLD) as prefill:
        delivery, ended = prefill.server.engine._delivery, list[int]()
        on_tokens = delivery.on_tokens

        def noted(rank: int, events: Sequence[TokenEvent]) -> None:
            ended.extend(event.number for event in events)
            on_tokens(rank, events)

        monkeypatch.setattr(delivery, "on_tokens", noted)
        numbers = itertools.count()
        for seconds in MOMENTS:
            while await dropped(prefill, prompt(next(numbers)) * 8, seconds, ended):
                pass  # again: its last step came before the cancellation
        await nothing_held(prefill)
        assert sum(prefill.count(f"handoff_holds/{why}") for why in HoldEnd) == len(ended)


async def dropped(prefill: Running, ids: list[int], seconds: float, ended: list[int]) -> bool:
    """Cancels a prefill so long after its handle came. ended: numbers of those that came to their end.

    Returns: whether this one did. Its blocks are released then.
    """
    before = len(ended)
    call = prefill.client.generate(ids, max_new_tokens=1, hold_kv=True, timeout=WAIT)
    handle = (await anext(event async for event in call if event.HasField("kv_handle"))).kv_handle
    await asyncio.sleep(seconds)
    call.cancel()
    await parked(prefill.server)
    if len(ended) == before:
        return False
    await prefill.client.decode.ReleaseKv(decode_pb2.ReleaseKvRequest(key=handle.key))
    return True


@pytest.mark.parametrize("moment", ["handle", "unread", "reading"])
async def test_a_client_that_leaves_leaves_nothing_behind(servers: Pair, moment: str) -> None:
    prefill, decode = servers
    first = 100 + 20 * ["handle", "unread", "reading"].index(moment)
    async with (
        AsyncClient(decode.server.address) as client,
        PrefillDecode(prefill.server.address, client, handle_seconds=WAIT) as handing,
    ):
        for number, seconds in enumerate(MOMENTS, start=first):
            begun = asyncio.create_task(handing.generate(prompt(number), timeout=WAIT, **GREEDY))
            if moment == "handle":
                await asyncio.sleep(seconds)
                begun.cancel()
                await asyncio.wait([begun])
                if begun.cancelled():
                    continue
            stream = await begun
            if moment == "reading":
                reading = asyncio.create_task(stream.read())
                await asyncio.sleep(seconds)
                reading.cancel()
                await asyncio.wait([reading])
            elif moment == "unread":
                await asyncio.sleep(seconds)
            await stream.close()
        await nothing_held(prefill)
        await nothing_held(decode)


@pytest.mark.parametrize(
    ("wrong", "error"), [({"n": 2}, TypeError), ({"max_new_tokens": -1}, InvalidArgument)]
)
async def test_a_request_that_nobody_can_make_holds_nothing(
    servers: Pair, wrong: dict[str, Any], error: type[Exception]
) -> None:
    prefill, decode = servers
    async with (
        AsyncClient(decode.server.address) as client,
        PrefillDecode(prefill.server.address, client, handle_seconds=WAIT) as handing,
    ):
        with pytest.raises(error):
            await handing.generate(prompt(160), timeout=WAIT, **{**GREEDY, **wrong})
        await nothing_held(prefill)


async def test_two_servers_that_ask_for_one_hold(servers: Pair) -> None:
    prefill, decode = servers
    async with serving("decode", scheduler__block_size=3, **PATIENT) as other:
        for number, local in ((200, True), (201, False)):
            ids = prompt(number)
            handle = await held(prefill, ids)
            if not local:
                handle.local = ""
            both = [continued(each, ids, handle, **GREEDY) for each in (decode, other)]
            outputs = await asyncio.gather(*both)
            expected = await alone(decode, ids)
            assert [output.token_ids for output in outputs] == [expected, expected]
            assert max(output.finished.usage.cached_tokens for output in outputs) == LENGTH - 1
        await nothing_held(prefill)


async def test_an_expired_hold_is_computed_again() -> None:
    async with pair({"handoff__hold_seconds": 0.1}) as (prefill, decode):
        handle = await held(prefill, prompt(0))
        await counted(prefill, "handoff_holds/expired", 1)
        await nothing_held(prefill)
        output = await continued(decode, prompt(0), handle, **GREEDY)
        assert output.token_ids == await alone(decode, prompt(0))
        assert output.finished.usage.cached_tokens == 0


async def test_a_prefill_server_killed_during_the_transfer() -> None:
    cached, whole = LENGTH * MANY, LENGTH * MANY - 1
    while not cached < whole:  # again if all was fetched before the signal
        cached = await killed_during_the_transfer()


async def killed_during_the_transfer() -> int:
    """A step has one token. Returns: tokens that the decode server got."""
    options = {"scheduler__kv_blocks": 512}
    slow = {"scheduler__max_step_tokens": 1, **options, **HOLD}
    async with pair(slow, {**options, **PATIENT}) as (prefill, decode):
        ids = prompt(1) * MANY
        expected = await alone(decode, ids)
        call = prefill.client.generate(ids, max_new_tokens=1, hold_kv=True, timeout=WAIT)
        handle = (await anext(event async for event in call if event.HasField("kv_handle"))).kv_handle
        task = asyncio.create_task(continued(decode, ids, handle, bypass_prefix_cache=True, **GREEDY))
        await counted(prefill, "handoff_bytes/sent", 1)
        os.kill(prefill.ranks.pids[0], signal.SIGKILL)
        output = await task
        assert output.token_ids == expected
        call.cancel()
        await nothing_held(decode)
        return int(output.finished.usage.cached_tokens)


async def prefilled(server: Running, ids: list[int]) -> dict[str, Any]:
    """kv_transfer_params as a gateway gets them."""
    async with grpc.aio.insecure_channel(server.server.address) as channel:
        asked = _asked(ids, '{"do_remote_decode": true}', max_tokens=1)
        messages = [each async for each in VllmEngineStub(channel).Generate(asked, timeout=WAIT)]
    params: dict[str, Any] = json.loads(messages[-1].complete.kv_transfer_params_json)
    return params


async def decoded(server: Running, ids: list[int], params: dict[str, Any]) -> Any:
    async with grpc.aio.insecure_channel(server.server.address) as channel:
        asked = _asked(ids, json.dumps(params), max_tokens=9)
        messages = [each async for each in VllmEngineStub(channel).Generate(asked, timeout=WAIT)]
    return messages[-1].complete


def _asked(ids: list[int], params: str, max_tokens: int) -> Any:
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=ids),
        sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        kv_transfer_params_json=params,
    )


async def test_params_of_a_gateway_hand_off(servers: Pair) -> None:
    prefill, decode = servers
    ids = prompt(300)
    complete = await decoded(decode, ids, await prefilled(prefill, ids))
    assert [*complete.output_ids] == await alone(decode, ids)
    assert complete.cached_tokens == LENGTH - 1
    await nothing_held(prefill)


IGNORED = {  # the handle says all
    "remote_engine_id": "of another server",
    "remote_request_id": None,
    "remote_block_ids": [-1, 2**70],
}


@pytest.mark.parametrize("name", IGNORED)
async def test_ids_that_only_vllm_needs_change_nothing(servers: Pair, name: str) -> None:
    prefill, decode = servers
    ids = prompt(310 + list(IGNORED).index(name))
    params = {**await prefilled(prefill, ids), name: IGNORED[name]}
    complete = await decoded(decode, ids, params)
    assert [*complete.output_ids] == await alone(decode, ids)
    assert complete.cached_tokens == LENGTH - 1


ELSEWHERE: dict[str, dict[str, Any]] = {  # the rank is not there: the prompt is computed
    "a port that is closed": {"remote_host": "127.0.0.1", "remote_port": 1},
    "no port": {"remote_host": "127.0.0.1", "remote_port": 0},
    "no such host": {"remote_host": "no-such-host.invalid"},
}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "negative port": ({"remote_port": -1}, "remote_port = '-1': must be 0 to 65535"),
    "huge port": ({"remote_port": 2**70}, "remote_port = '1180591620717411303424': must be 0 to 65535"),
    "port as text": ({"remote_port": "50100"}, "remote_port = '50100': must be 0 to 65535"),
    "port as flag": ({"remote_port": True}, "remote_port = 'True': must be 0 to 65535"),
    "host as number": ({"remote_host": 7}, "remote_host = '7': must be printable text"),
    "long host": ({"remote_host": "a" * 400}, "remote_host = 'aaaa"),
    "no handle": ({"remote_handle": None}, "remote_handle = 'None': must be as another ep-server gave it"),
    "broken handle": ({"remote_handle": "AAAA"}, "remote_handle"),
    "empty handle": ({"remote_handle": ""}, "remote_handle.key = '0 bytes': must be 16 bytes"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_wrong_params_are_named(servers: Pair, case: str) -> None:
    prefill, decode = servers
    ids, (changed, message) = prompt(320 + list(WRONG).index(case)), WRONG[case]
    given = await prefilled(prefill, ids)
    refused = await failure(decoded(decode, ids, given | changed))
    assert refused.code() is Code.INVALID_ARGUMENT
    assert f"kv_transfer_params_json.{message}" in refused.details()
    assert [*(await decoded(decode, ids, given)).output_ids] == await alone(decode, ids)
    await nothing_held(prefill)


@pytest.mark.parametrize("case", ELSEWHERE)
async def test_an_address_where_nobody_is(servers: Pair, case: str) -> None:
    prefill, decode = servers
    ids = prompt(340 + list(ELSEWHERE).index(case))
    params = await prefilled(prefill, ids)
    handle = json.loads(json.dumps(params)) | ELSEWHERE[case]
    complete = await decoded(decode, ids, handle)
    assert [*complete.output_ids] == await alone(decode, ids)


async def test_a_handle_of_another_prompt_is_named(servers: Pair) -> None:
    prefill, decode = servers
    other = await prefilled(prefill, prompt(350))
    refused = await failure(decoded(decode, prompt(351), other))
    assert refused.code() is Code.INVALID_ARGUMENT
    assert "kv_transfer_params_json.remote_handle.prompt" in refused.details()
    await decoded(decode, prompt(350), other)
    assert await used(decode) == 0
    await nothing_held(prefill)
