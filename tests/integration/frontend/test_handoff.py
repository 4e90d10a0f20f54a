"""A prompt's KV blocks move from one server to another, between rank processes of both: the same tokens."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ep_server.client import AsyncClient, PrefillDecode
from ep_server.errors import InvalidArgument
from ep_server.v1 import control_pb2, decode_pb2
from tests.support.fabric.fabric_ends import needs
from tests.support.frontend import WAIT, Code, failure, parked
from tests.support.handoff.servers import (
    MODEL,
    Running,
    continued,
    counted,
    held,
    nothing_held,
    pair,
    serving,
    something_held,
    used,
)
from tests.support.models.checkpoints import CASES
from tests.support.models.fixtures import checkpoint
from tests.support.models.perturbed import perturbed

pytestmark = pytest.mark.asyncio(loop_scope="module")
LENGTH = 75
GREEDY = {"max_new_tokens": 9, "ignore_eos": True, "temperature": 0.0}
SEEDED = {"max_new_tokens": 9, "ignore_eos": True, "temperature": 1.0, "seed": 7, "top_k": 9}
PENALTIES = {**SEEDED, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5}
GRAMMAR = {"max_new_tokens": 9, "temperature": 1.0, "seed": 3, "regex": "[0-9]{4}"}

PATIENT = {"handoff__silence_seconds": 60.0, "handoff__stall_seconds": 60.0}  # with a busy machine

Pair = tuple[Running, Running]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[Pair]:
    """Rank counts and block sizes differ."""
    async with pair({"parallel__ranks": 2, **PATIENT}, {"scheduler__block_size": 7, **PATIENT}) as both:
        yield both


def prompt(number: int) -> list[int]:
    """Nobody has it in the prefix cache."""
    return [number // 13, number % 13, *((5 * n + n * n) % 13 for n in range(2, LENGTH))]


@pytest.mark.parametrize("fields", [GREEDY, SEEDED, PENALTIES, GRAMMAR], ids=range(4))
async def test_the_second_server_gives_the_same_tokens(servers: Pair, fields: dict[str, Any]) -> None:
    prefill, decode = servers
    ids = prompt(len(fields))
    alone = await prefill.client.complete(ids, timeout=WAIT, bypass_prefix_cache=True, **fields)
    shared = decode.count("handoff_fetches/shared_memory")
    before = decode.count("handoffs/received"), prefill.count("handoffs/sent")
    handle = await held(prefill, ids)
    assert (handle.tokens, handle.block_size, handle.blocks) == (LENGTH, 4, 19)
    output = await continued(decode, ids, handle, **fields)
    assert output.token_ids == alone.token_ids
    assert output.finished.usage.cached_tokens == 74  # the last token runs in any case
    await counted(decode, "handoffs/received", before[0] + 1)
    await counted(decode, "handoff_fetches/shared_memory", shared + 1)
    await counted(prefill, "handoffs/sent", before[1] + 1)


async def test_blocks_move_while_the_prefill_runs(servers: Pair) -> None:
    """The handle is used as soon as the prefill server gives it."""
    prefill, decode = servers
    ids = prompt(20) * 6
    alone = await decode.client.complete(ids, timeout=WAIT, bypass_prefix_cache=True, **GREEDY)
    call = prefill.client.generate(ids, max_new_tokens=1, hold_kv=True, timeout=WAIT)
    handle = None
    async for event in call:
        if event.HasField("kv_handle"):
            handle = event.kv_handle
            break
    output = await continued(decode, ids, handle, **GREEDY)
    assert output.token_ids == alone.token_ids
    assert output.finished.usage.cached_tokens == len(ids) - 1


async def test_blocks_move_over_tcp(servers: Pair) -> None:
    prefill, decode = servers
    ids, before = prompt(30), decode.count("handoff_fetches/tcp")
    alone = await decode.client.complete(ids, timeout=WAIT, bypass_prefix_cache=True, **GREEDY)
    handle = await held(prefill, ids)
    handle.local = ""
    output = await continued(decode, ids, handle, **GREEDY)
    assert output.token_ids == alone.token_ids
    assert output.finished.usage.cached_tokens == 74
    await counted(decode, "handoff_fetches/tcp", before + 1)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("qwen3_moe-dense-layer-bias-shards", id="window", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", id="latent"),
    ],
)
async def test_blocks_of_other_caches_move(name: str) -> None:
    """With a window of 24 tokens in some layers, and of latent attention. The oracle: transformers."""
    case = next(each for each in CASES if each.name == name)
    tiny = await asyncio.to_thread(checkpoint, case)
    options = {"model__path": str(tiny.path), **PATIENT}
    async with pair(options, {**options, "scheduler__block_size": 7}) as (prefill, decode):
        for ids, expected in zip(tiny.prompts, tiny.tokens, strict=True):
            call = {**GREEDY, "max_new_tokens": len(expected)}
            output = await continued(decode, list(ids), await held(prefill, list(ids)), **call)
            assert output.token_ids == list(expected)
            assert output.finished.usage.cached_tokens == len(ids) - 1


async def test_a_prompt_may_go_on_after_the_handed_off_part(servers: Pair) -> None:
    prefill, decode = servers
    ids, more = prompt(40), prompt(41)[:20]
    alone = await decode.client.complete([*ids, *more], timeout=WAIT, bypass_prefix_cache=True, **GREEDY)
    output = await continued(decode, [*ids, *more], await held(prefill, ids), **GREEDY)
    assert output.token_ids == alone.token_ids
    assert output.finished.usage.cached_tokens == 75


async def test_several_sequences_share_the_fetched_blocks(servers: Pair) -> None:
    prefill, decode = servers
    ids, fields = prompt(50), {**SEEDED, "num_sequences": 3}
    alone = await decode.client.complete(ids, timeout=WAIT, bypass_prefix_cache=True, **fields)
    output = await continued(decode, ids, await held(prefill, ids), **fields)
    outputs = [output, *output.others]
    assert [each.token_ids for each in outputs] == [each.token_ids for each in (alone, *alone.others)]
    assert [each.finished.usage.cached_tokens for each in outputs] == [74, 70, 70]  # whole blocks are shared


async def test_a_second_fetch_computes_the_prompt(servers: Pair) -> None:
    """One fetch ends a handle."""
    prefill, decode = servers
    ids = prompt(60)
    handle = await held(prefill, ids)
    first = await continued(decode, ids, handle, bypass_prefix_cache=True, **GREEDY)
    second = await continued(decode, ids, handle, bypass_prefix_cache=True, **GREEDY)
    assert first.token_ids == second.token_ids
    assert [each.finished.usage.cached_tokens for each in (first, second)] == [74, 0]


async def test_released_blocks_are_free_and_not_fetched(servers: Pair) -> None:
    prefill, decode = servers
    await nothing_held(prefill)  # what the tests before have fetched is freed a moment later
    ids, before = prompt(70), await used(prefill)
    handle = await held(prefill, ids)
    await parked(prefill.server)
    ranks = (await prefill.client.loads()).ranks
    assert sum(rank.kv_blocks_held for rank in ranks) == 19
    assert (await released(prefill, handle.key)).blocks == 19
    assert (await released(prefill, handle.key)).blocks == 0
    await nothing_held(prefill, before)
    output = await continued(decode, ids, handle, **GREEDY)
    alone = await decode.client.complete(ids, timeout=WAIT, bypass_prefix_cache=True, **GREEDY)
    assert output.token_ids == alone.token_ids
    assert output.finished.usage.cached_tokens == 0


async def released(server: Running, key: bytes) -> Any:
    return await server.client.decode.ReleaseKv(decode_pb2.ReleaseKvRequest(key=key))


async def test_what_does_not_fit_is_named(servers: Pair) -> None:
    prefill, decode = servers
    ids = prompt(80)
    handle = await held(prefill, ids)
    handle.format = "qwen3_moe/48x2048/bfloat16/kv-bfloat16/00000000"
    refused = await failure(decode.client.complete(ids, kv_handle=handle, timeout=WAIT))
    assert refused.code() is Code.INVALID_ARGUMENT
    assert "kv_handle.format = 'qwen3_moe/48x2048" in refused.details()
    assert "as of this server" in refused.details()
    other = await failure(
        decode.client.complete(prompt(81), kv_handle=await held(prefill, ids), timeout=WAIT)
    )
    assert "kv_handle.prompt" in other.details()
    for name, value in (("address", "a" * 301), ("local", "two\nlines")):
        fresh = await held(prefill, ids)
        setattr(fresh, name, value)
        strange = await failure(decode.client.complete(ids, kv_handle=fresh, timeout=WAIT))
        assert strange.code() is Code.INVALID_ARGUMENT
        assert f"kv_handle.{name} = '{value[:3]}" in strange.details()
        assert "at most 300 printable characters" in strange.details()
    wrong = await failure(decode.client.complete(ids, hold_kv=True, timeout=WAIT))
    assert "hold_kv = 'true': must be absent: this server has handoff.role = decode" in wrong.details()
    late = await failure(prefill.client.complete(ids, kv_handle=await held(prefill, ids), timeout=WAIT))
    assert "this server has handoff.role = prefill" in late.details()


async def test_other_weights_are_not_used(servers: Pair) -> None:
    prefill, decode = servers
    await parked(prefill.server)
    ids, before = prompt(90), await used(prefill)
    handle = await held(prefill, ids)
    handle.weights = "0" * 32
    output = await continued(decode, ids, handle, **GREEDY)
    assert output.finished.usage.cached_tokens == 0
    await nothing_held(prefill, before)


async def test_weights_that_replace_files_are_told_apart(tmp_path: Path) -> None:
    """Both servers read one directory, whose files change. One side updates, then the other."""
    path = shutil.copytree(MODEL, tmp_path / "model")
    options = {"model__path": str(path), "model__updates": "/", **PATIENT}
    async with pair(options, options) as (prefill, decode):
        fetched = [(await continued(decode, prompt(0), await held(prefill, prompt(0)), **GREEDY))]
        for file in perturbed(MODEL, tmp_path / "other", share=1.0).glob("*.safetensors"):
            shutil.copy(file, path)
        for number, server in enumerate((prefill, decode), start=1):
            await server.client.control.UpdateWeights(control_pb2.UpdateWeightsRequest(path=str(path)))
            ids = prompt(number)
            fetched.append(await continued(decode, ids, await held(prefill, ids), **GREEDY))
            alone = await decode.client.complete(ids, timeout=WAIT, bypass_prefix_cache=True, **GREEDY)
            assert fetched[-1].token_ids == alone.token_ids
        assert [each.finished.usage.cached_tokens for each in fetched] == [74, 0, 74]


async def handle_of(events: AsyncIterator[Any]) -> Any:
    """As soon as the prefill server gives it."""
    async for event in events:
        if event.HasField("kv_handle"):
            return event.kv_handle
    raise AssertionError("no handle")


async def test_a_cancelled_fetch_frees_the_blocks_of_the_other_server() -> None:
    """Also where its request waits: the decode server's only place is taken."""
    async with pair(decode={"scheduler__max_running": 1}) as (prefill, decode):
        first = decode.client.generate(prompt(1), max_new_tokens=150, ignore_eos=True, timeout=WAIT)
        await anext(aiter(first))
        handle = await held(prefill, prompt(2))
        await something_held(prefill)
        second = decode.client.generate(prompt(2), kv_handle=handle, timeout=WAIT, **GREEDY)
        await anext(aiter(second))
        second.cancel()
        await nothing_held(prefill)
        first.cancel()


async def test_blocks_are_freed_after_a_fetch_that_takes_too_long() -> None:
    """The prefill runs on, in many steps; what it computes then is held for nobody."""
    slow = {"scheduler__max_step_tokens": 1}
    async with pair(slow, {"handoff__timeout_seconds": 0.1}) as (prefill, decode):
        call = prefill.client.generate(prompt(5), max_new_tokens=1, hold_kv=True, timeout=WAIT)
        events = aiter(call)
        handle = await handle_of(events)
        output = await continued(decode, prompt(5), handle, **GREEDY)
        alone = await decode.client.complete(prompt(5), timeout=WAIT, bypass_prefix_cache=True, **GREEDY)
        assert output.token_ids == alone.token_ids
        async for _ in events:
            pass
        await nothing_held(prefill)


async def test_a_prompt_whose_rank_was_lost_is_held_for_nobody() -> None:
    """Its handle names the rank before. The prefill ends all the same, at another rank or process."""
    often = {"resilience__on_rank_loss": "recover", "resilience__rank_losses": 0, "resilience__max_losses": 9}
    slow = {"scheduler__max_step_tokens": 1, "parallel__ranks": 2, "scheduler__kv_blocks": 128}
    async with serving("prefill", **often, **slow) as prefill:
        call = prefill.client.generate(
            prompt(6), max_new_tokens=1, hold_kv=True, dp_rank=1, timeout=WAIT, ignore_eos=True
        )
        events = aiter(call)
        assert (await handle_of(events)).key
        os.kill(prefill.ranks.pids[1], signal.SIGKILL)
        last = [event async for event in events][-1]
        assert last.HasField("finished")
        await nothing_held(prefill)


async def test_blocks_that_nobody_needs_are_freed(servers: Pair) -> None:
    """The decode server has them in its prefix cache, or may not read any: it says so."""
    prefill, decode = servers
    ids = prompt(100)
    await decode.client.complete(ids, timeout=WAIT, **GREEDY)
    for fields in (GREEDY, {**GREEDY, "prompt_logprobs": 0}):
        await parked(prefill.server)
        before = await used(prefill)
        handle = await held(prefill, ids)
        await continued(decode, ids, handle, **fields)
        async with asyncio.timeout(WAIT):
            while await used(prefill) > before:
                await asyncio.sleep(0.02)


async def test_blocks_move_over_libfabric() -> None:
    """On the loopback, as between hosts: while the prefill runs, and after it."""
    needs("system")
    network = {"handoff__transport": "libfabric", "fabric__address": "127.0.0.1", **PATIENT}
    async with pair(network, {**network, "scheduler__block_size": 7}) as (prefill, decode):
        ids = prompt(0) * 4
        alone = await decode.client.complete(ids, timeout=WAIT, bypass_prefix_cache=True, **GREEDY)
        call = prefill.client.generate(ids, max_new_tokens=1, hold_kv=True, timeout=WAIT)
        during = (await anext(event async for event in call if event.HasField("kv_handle"))).kv_handle
        reading = asyncio.create_task(_read(call))
        during.local = ""
        outputs = [await continued(decode, ids, during, bypass_prefix_cache=True, **GREEDY)]
        await reading
        later = await held(prefill, ids)
        later.local = ""
        outputs.append(await continued(decode, ids, later, bypass_prefix_cache=True, **GREEDY))
        for output in outputs:
            assert output.token_ids == alone.token_ids
            assert output.finished.usage.cached_tokens == len(ids) - 1
        await counted(decode, "handoff_fetches/libfabric", 2)


async def _read(call: Any) -> None:
    async for _ in call:
        pass


async def test_held_blocks_expire() -> None:
    async with serving("prefill", handoff__hold_seconds=0.2) as prefill:
        await held(prefill, prompt(0))
        async with asyncio.timeout(WAIT):
            while (await prefill.client.loads()).ranks[0].kv_blocks_used:
                await asyncio.sleep(0.02)
        await counted(prefill, "handoff_holds/expired", 1)
        assert prefill.count("handoff_hold_ns") > 0.2e9


async def test_held_blocks_make_room_for_requests() -> None:
    """Those held longest are given up; whoever comes for them computes the prompt."""
    async with pair({"scheduler__kv_blocks": 24}) as (prefill, decode):
        handle = await held(prefill, prompt(0))
        await held(prefill, prompt(1))
        output = await continued(decode, prompt(0), handle, **GREEDY)
        assert output.finished.usage.cached_tokens == 0
        alone = await decode.client.complete(prompt(0), timeout=WAIT, bypass_prefix_cache=True, **GREEDY)
        assert output.token_ids == alone.token_ids


async def test_a_refused_request_holds_no_blocks() -> None:
    """The decode server has not admitted it, so no rank says that its blocks are not needed."""
    async with (
        pair() as (prefill, decode),
        AsyncClient(decode.server.address) as client,
        PrefillDecode(prefill.server.address, client, handle_seconds=WAIT) as handing,
    ):
        stream = await handing.generate(prompt(5), temperature=-1.0, timeout=WAIT)
        await something_held(prefill)
        with pytest.raises(InvalidArgument, match="temperature"):
            await stream.read()
        await nothing_held(prefill)


async def test_a_prefill_bypasses_the_prefix_cache_too() -> None:
    async with (
        pair(PATIENT, PATIENT) as (prefill, decode),
        AsyncClient(decode.server.address) as client,
        PrefillDecode(prefill.server.address, client, handle_seconds=WAIT) as handing,
    ):
        for _ in range(2):
            stream = await handing.generate(prompt(6), bypass_prefix_cache=True, timeout=WAIT, **GREEDY)
            output = await stream.read()
            assert output.finished is not None and output.finished.usage.cached_tokens == LENGTH - 1
        await nothing_held(prefill)
        for server in (prefill, decode):
            (rank,) = (await server.client.loads()).ranks
            assert (rank.kv_blocks_cached, rank.prefix_queries) == (0, 0)


@pytest.mark.parametrize("silent", [False, True], ids=["closed", "silent"])
async def test_without_the_prefill_server_the_prompt_is_computed(silent: bool) -> None:
    """Its address refuses connections, or takes them and says nothing."""
    async with pair(decode={"handoff__silence_seconds": 1.0}) as (prefill, decode):
        ids = prompt(3)
        handle = await held(prefill, ids)
        listener = socket.create_server(("127.0.0.1", 0))  # its backlog connects; nobody reads
        port = listener.getsockname()[1]
        if not silent:
            listener.close()
        handle.local, handle.address = "", f"127.0.0.1:{port}"
        output = await continued(decode, ids, handle, **GREEDY)
        alone = await decode.client.complete(ids, timeout=WAIT, bypass_prefix_cache=True, **GREEDY)
        assert output.token_ids == alone.token_ids
        await counted(decode, "handoffs/failed", 1)
        if silent:
            listener.close()
