"""New weights while requests run. The oracle is a server that was started on the new checkpoint."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict
from safetensors.torch import load_file, save_file

from ep_server.cli.demo.run import DEMO_MODEL
from ep_server.config import Config
from ep_server.engine.engine import EngineState
from ep_server.errors import Unavailable
from ep_server.frontend.served_model import ServedModel
from ep_server.frontend.server import Server
from ep_server.ranks.launcher import RankProcesses
from ep_server.ranks.restarting import RestartingRanks
from ep_server.testing.fake_ranks import FakeRanks
from ep_server.v1 import control_pb2
from tests.support.frontend import Recorder, serving
from tests.support.models.perturbed import perturbed
from tests.support.raw_client import Output, RawClient

WAIT = 120.0
LONG = [i * i * i % 15 for i in range(70)]  # several KV blocks
PROMPTS = [[1, 5, 3, 7], LONG, LONG[:40], [9]]
NEW = 24
ENDLESS = {"max_new_tokens": 400, "min_new_tokens": 400, "ignore_eos": True, "temperature": 1.5, "seed": 7}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with other values."""
    return perturbed(DEMO_MODEL, tmp_path_factory.mktemp("weights") / "other", share=1.0)


@asynccontextmanager
async def demo(path: Path = DEMO_MODEL) -> AsyncIterator[tuple[Server, RestartingRanks, RawClient]]:
    config = Config.from_values(
        {
            "grpc.port": 0,
            "model.path": str(path),
            "model.updates": "/",
            "model.dtype": "float32",
            "exchange.reduction": "source",
            "parallel.ranks": 2,
            "parallel.threads_per_rank": 1,
            "scheduler.kv_blocks": 1024,
            "scheduler.max_step_tokens": 32,
        }
    )
    ranks = RestartingRanks(lambda: RankProcesses(config, outlive=True))
    server = Server(config, ServedModel.load(config.model), ranks, Recorder())
    await server.start(lambda *_: None)
    try:
        async with RawClient(server.address) as client:
            yield server, ranks, client
        server.engine.check_integrity()
    finally:
        await server.drain()
        await server.stop()


def in_force(server: Server) -> tuple[int, str]:
    """Version and path of the weights."""
    return server.engine.weights.version, server.engine.weights.path


async def handed_off(client: RawClient, found: list[str]) -> None:
    """Adds what the handle of a new request says about the weights."""
    async for event in client.generate([1, 2, 3], max_new_tokens=1, hold_kv=True, timeout=WAIT):
        if event.HasField("kv_handle"):
            found.append(event.kv_handle.weights)


async def update(client: RawClient, path: Path) -> Any:
    request = control_pb2.UpdateWeightsRequest(path=str(path))
    return await client.control.UpdateWeights(request, timeout=WAIT)


async def refused(client: RawClient, path: Path) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await update(client, path)
    return error.value.code().name, error.value.details() or ""


async def answers(client: RawClient) -> list[Output]:
    fields: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True, "timeout": WAIT}
    drawn = [client.complete(one, temperature=2.0, seed=seed, **fields) for seed, one in enumerate(PROMPTS)]
    greedy = client.complete(LONG, temperature=0.0, repetition_penalty=1.2, **fields)
    return list(await asyncio.gather(*drawn, greedy))


def tokens(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


async def stream(client: RawClient, begun: asyncio.Event, prompt: list[int]) -> list[tuple[int, int]]:
    """(token, version of weights) of one long request; sets `begun` after a few tokens."""
    found: list[tuple[int, int]] = []
    async for event in client.generate(prompt, timeout=WAIT, **ENDLESS):
        if event.WhichOneof("event") == "tokens":
            part = event.tokens
            earlier = part.tokens_of_earlier_weights
            for index, token in enumerate(part.token_ids):
                found.append((token, part.weights_version - (index < earlier)))
        if len(found) >= 8:
            begun.set()
    return found


async def test_requests_after_an_update_see_new_weights(other: Path) -> None:
    async with demo(other) as (_, _, client):
        expected = tokens(await answers(client))
    async with demo() as (server, ranks, client):
        old = tokens(await answers(client))
        assert sum(a != b for a, b in zip(old, expected, strict=True)) >= 4
        alone = (await client.complete(LONG, timeout=WAIT, **ENDLESS)).token_ids
        assert (await server.engine.flush_cache(WAIT)) > 0
        warm = await client.complete(LONG, max_new_tokens=1, timeout=WAIT)

        # Parked ranks switch too, and then run nothing of the old weights.
        done = await update(client, other)
        print("parked:", MessageToDict(done))
        assert done.version == 1 and done.bytes > 0 and done.pause_bound_seconds > 0
        found = await answers(client)
        assert tokens(found) == expected
        assert warm.finished.usage.cached_tokens == found[0].finished.usage.cached_tokens == 0
        info = await client.server_info()
        assert (info.weights_version, info.weights_path) == (1, str(other))

        # While streams run: each token is of the weights that its message names.
        seen = [{1}]
        while any(len(versions) < 2 for versions in seen):  # again if a stream ended before the update
            first = (await update(client, DEMO_MODEL)).version
            begun = [asyncio.Event() for _ in range(4)]
            running = [asyncio.ensure_future(stream(client, event, LONG)) for event in begun]
            for event in begun:
                await asyncio.wait_for(event.wait(), WAIT)
            done = await update(client, other)
            print("under load:", MessageToDict(done))
            assert done.version == first + 1
            seen = []
            for found_tokens in await asyncio.gather(*running):
                before = [token for token, version in found_tokens if version == first]
                versions = [version for _, version in found_tokens]
                seen.append(set(versions))
                assert len(found_tokens) == 400 and versions == sorted(versions)
                assert seen[-1] <= {first, done.version}
                assert before == alone[: len(before)]
                assert len(seen[-1]) == 1 or [token for token, _ in found_tokens] != alone
        assert tokens(await answers(client)) == expected

        # A recovery loads them.
        os.kill(ranks.group.pids[1], signal.SIGKILL)  # type: ignore[attr-defined]
        while server.engine.state is EngineState.SERVING:
            await asyncio.sleep(0.001)
        with pytest.raises(Unavailable):  # without a channel, which may take longer than the recovery
            await server.engine.update_weights(str(DEMO_MODEL), lambda path: "")
        found = await answers(client)
        assert tokens(found) == expected
        assert in_force(server) == (done.version, str(other))


async def retried(client: RawClient, path: Path) -> Any:
    """An update, as soon as no rank joins."""
    async with asyncio.timeout(120):
        while True:
            try:
                return await update(client, path)
            except grpc.RpcError as error:
                if "try again after that" not in str(error.details()):
                    raise
            await asyncio.sleep(0.05)


async def test_a_rank_lost_during_an_update_changes_nothing(other: Path) -> None:
    async with demo() as (server, ranks, client):
        old = tokens(await answers(client))
        os.kill(ranks.group.pids[1], signal.SIGSTOP)  # type: ignore[attr-defined]
        updating = asyncio.ensure_future(refused(client, other))
        while not server.engine.weights._orders._open:
            await asyncio.sleep(0.001)
        second = await refused(client, DEMO_MODEL)
        assert second == ("FAILED_PRECONDITION", f"an update to {other} is running")
        os.kill(ranks.group.pids[1], signal.SIGKILL)  # type: ignore[attr-defined]
        code, why = await updating
        assert code == "UNAVAILABLE" and "rank 1 was lost" in why
        assert tokens(await answers(client)) == old
        assert in_force(server) == (0, str(DEMO_MODEL))
        assert (await retried(client, other)).version == 1
        new = tokens(await answers(client))
        assert new != old
        os.kill(ranks.group.pids[0], signal.SIGKILL)  # type: ignore[attr-defined]
        assert tokens(await answers(client)) == new
        assert in_force(server) == (1, str(other))


def _drop_tensor(path: Path) -> str:
    stored = load_file(path / "model.safetensors")
    name = sorted(stored)[0]
    del stored[name]
    save_file(stored, path / "model.safetensors")
    return f"its tensor {name} is missing"


def _other_dtype(path: Path) -> str:
    stored = load_file(path / "model.safetensors")
    stored["model.norm.weight"] = stored["model.norm.weight"].double()
    save_file(stored, path / "model.safetensors")
    return "its tensor model.norm.weight is F64"


def _other_tokenizer(path: Path) -> str:
    with (path / "tokenizer.json").open("a") as file:
        file.write("\n")
    return "its tokenizer.json is another one"


def _no_config(path: Path) -> str:
    (path / "config.json").unlink()
    return "config.json"


@pytest.mark.parametrize("edit", [_drop_tensor, _other_dtype, _other_tokenizer, _no_config])
async def test_a_checkpoint_that_differs_is_refused(edit: Any, tmp_path: Path) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path / "other")
    why = edit(tmp_path / "other")
    async with serving(FakeRanks(2), model__path=str(DEMO_MODEL), model__updates="/") as made:
        code, details = await refused(made.client, tmp_path / "other")
        assert code == "INVALID_ARGUMENT" and why in details
        assert in_force(made.server) == (0, str(DEMO_MODEL))
        assert (await update(made.client, DEMO_MODEL)).version == 1


async def test_only_checkpoints_of_the_named_folder_are_taken(tmp_path: Path) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path / "in" / "model")
    outside = tmp_path / "in" / ".." / "out"
    shutil.copytree(DEMO_MODEL, tmp_path / "out")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out")
    async with serving(
        FakeRanks(2), model__path=str(DEMO_MODEL), model__updates=str(tmp_path / "in")
    ) as made:
        for path in (outside, tmp_path / "in" / "link", tmp_path / "out", Path(), Path("a\0b")):
            code, details = await refused(made.client, path)
            assert code == "INVALID_ARGUMENT" and "(model.updates)" in details
        assert (await update(made.client, tmp_path / "in" / "model")).version == 1
    async with serving(FakeRanks(2), model__path=str(DEMO_MODEL)) as made:
        code, details = await refused(made.client, DEMO_MODEL)
        assert code == "UNIMPLEMENTED" and "model.updates" in details


async def test_a_refusing_rank_changes_nothing() -> None:
    ranks = FakeRanks(2)
    ranks.refusal = "model.norm.weight: cannot be read"
    async with serving(ranks, model__path=str(DEMO_MODEL), model__updates="/") as made:
        expected = f"reading weights from {DEMO_MODEL}: rank 0: model.norm.weight: cannot be read"
        assert await refused(made.client, DEMO_MODEL) == ("UNAVAILABLE", expected)
        assert in_force(made.server) == (0, str(DEMO_MODEL)) and ranks.weights == ("", 0)
        ranks.refusal = ""
        assert (await update(made.client, DEMO_MODEL)).version == 1
        assert ranks.weights == (str(DEMO_MODEL), 1)


async def test_too_long_a_pause_is_refused() -> None:
    ranks = FakeRanks(2)
    ranks.copy_rate = 1e5
    async with serving(ranks, model__path=str(DEMO_MODEL), model__updates="/") as made:
        code, why = await refused(made.client, DEMO_MODEL)
        assert code == "UNAVAILABLE" and "for 10.5 s: at most exchange.timeout_seconds = 10" in why
        assert in_force(made.server) == (0, str(DEMO_MODEL))


async def test_a_draining_server_takes_no_weights() -> None:
    ranks = FakeRanks(2)
    async with serving(ranks, model__path=str(DEMO_MODEL), model__updates="/") as made:
        ranks.hold()
        updating = asyncio.ensure_future(refused(made.client, DEMO_MODEL))
        await made.until(lambda: bool(ranks._orders))
        await made.server.drain()
        assert await updating == ("UNAVAILABLE", "the server is shutting down")
        assert await refused(made.client, DEMO_MODEL) == ("UNAVAILABLE", "the server is shutting down")
        assert in_force(made.server) == (0, str(DEMO_MODEL))


async def test_a_loss_in_the_switch_leaves_the_new_weights() -> None:
    """All ranks have prepared them, and some may have published tokens of them."""
    ranks = FakeRanks(2)
    values = {"resilience__on_rank_loss": "recover", "model__path": str(DEMO_MODEL), "model__updates": "/"}
    async with serving(ranks, **values) as made:
        ranks.hold()
        updating = asyncio.ensure_future(refused(made.client, DEMO_MODEL))
        await made.until(lambda: bool(ranks._orders))
        ranks.step()  # prepared
        await made.until(lambda: ranks.weights[1] == 1)
        ranks.kill(1)
        code, why = await updating
        assert code == "UNAVAILABLE" and "rank 1 was lost" in why
        await made.until(lambda: made.server.engine.state is EngineState.SERVING)
        assert in_force(made.server) == (1, str(DEMO_MODEL))
        assert [scheduler.weights for scheduler in ranks._schedulers] == [1, 1]


async def test_a_handle_given_in_the_switch_names_no_weights() -> None:
    """Ranks may still compute its prompt with those before."""
    ranks, found = FakeRanks(1), list[str]()
    values = {"model__path": str(DEMO_MODEL), "model__updates": "/", "handoff__role": "prefill"}
    async with serving(ranks, **values) as made:

        async def weights() -> None:
            await handed_off(made.client, found)

        await weights()
        ranks.hold()
        updating = asyncio.ensure_future(update(made.client, DEMO_MODEL))
        await made.until(lambda: bool(ranks._orders))
        ranks.step()  # prepared
        await made.until(lambda: ranks.weights[1] == 1)
        meanwhile = asyncio.ensure_future(weights())
        await made.until(lambda: len(found) == 2)
        ranks.release()
        await updating
        await meanwhile
        await weights()
        assert found[0] and found == [found[0], "", found[0]]


async def test_handles_name_weights_as_they_were_read(tmp_path: Path) -> None:
    """Files may be replaced after an update, before its first hand-off."""
    path, found = Path(shutil.copytree(DEMO_MODEL, tmp_path / "model")), list[str]()
    changed = perturbed(DEMO_MODEL, tmp_path / "changed", share=1.0)
    values = {"model__path": str(path), "model__updates": "/", "handoff__role": "prefill"}
    async with serving(FakeRanks(1), **values) as made:
        await handed_off(made.client, found)
        shutil.copytree(changed, path, dirs_exist_ok=True)
        await update(made.client, path)
        shutil.copytree(DEMO_MODEL, path, dirs_exist_ok=True)
        await handed_off(made.client, found)
        await update(made.client, path)
        await handed_off(made.client, found)
    assert found[1] and found == [found[0], found[1], found[0]] and found[1] != found[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_20_updates_end_no_stream(other: Path) -> None:
    async with demo() as (_, _, client):
        begun = [asyncio.Event() for _ in range(16)]
        running = [asyncio.ensure_future(stream(client, event, [n, *LONG])) for n, event in enumerate(begun)]
        for event in begun:
            await asyncio.wait_for(event.wait(), WAIT)
        pauses = []
        for number in range(20):
            done = await update(client, DEMO_MODEL if number % 2 else other)
            pauses.append(done.pause_seconds)
            assert done.version == number + 1
        print("pauses, ms:", [round(1000 * pause, 2) for pause in pauses])
        print("bound, ms:", round(1000 * done.pause_bound_seconds, 2), "bytes:", done.bytes)
        for found in await asyncio.gather(*running):
            versions = [version for _, version in found]
            assert len(found) == 400 and versions == sorted(versions)
