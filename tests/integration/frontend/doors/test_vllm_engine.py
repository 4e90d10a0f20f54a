"""vllm.grpc.engine.VllmEngine over FakeRanks, with the stubs that a gateway has."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import pytest_asyncio
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import sglang_scheduler_pb2 as foreign
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.sglang_scheduler_pb2_grpc import SglangSchedulerStub
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from ep_server.frontend.requests import MAX_LOGIT_BIAS
from ep_server.records import Grammar, GrammarKind
from ep_server.testing.fake_ranks import FakeRanks
from tests.support.cluster.relay import relayed
from tests.support.frontend import Code, Served, failure, next_event, rest, serving, trailers
from tests.support.structured import DEMO

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = [n % 200 for n in range(40)]


@dataclass
class Door:
    """A server and the calls of its door."""

    served: Served
    calls: Any
    channel: grpc.aio.Channel

    async def last_request(self, **params: Any) -> Any:
        """What the rank gets for these sampling parameters."""
        await rest(self.calls.Generate(request(max_tokens=1, **params)))
        return list(self.served.ranks.requests.values())[-1]


def request(ids: list[int] = PROMPT, *, stream: bool = True, **params: Any) -> Any:
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=ids),
        sampling_params=pb.SamplingParams(**params),
        stream=stream,
    )


def tokens_of(messages: list[Any], index: int = 0) -> list[int]:
    chunks = [message.chunk for message in messages if message.HasField("chunk")]
    return [token for chunk in chunks if chunk.index == index for token in chunk.token_ids]


def by_seed(request: Any, index: int) -> int:
    """Tokens of their own for each seed and each place."""
    return ((request.sampling.seed or 0) * 7 + index) % 128


@asynccontextmanager
async def opened(ranks: FakeRanks | None = None, **values: Any) -> AsyncIterator[Door]:
    async with (
        serving(ranks, **{"model__path": str(DEMO), **values}) as served,
        grpc.aio.insecure_channel(served.server.address) as channel,
    ):
        yield Door(served, VllmEngineStub(channel), channel)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door() -> AsyncIterator[Door]:
    async with opened(FakeRanks(2, next_token=by_seed)) as each:
        yield each


@pytest.mark.parametrize("stream", [True, False])
async def test_the_seed_gives_the_tokens_of_decode(door: Door, stream: bool) -> None:
    ours = await door.served.client.complete(PROMPT, max_new_tokens=5, seed=3, num_sequences=2)
    theirs = await rest(door.calls.Generate(request(stream=stream, max_tokens=5, seed=3, n=2)))
    ends = {message.complete.index: message.complete for message in theirs if message.HasField("complete")}
    for index, output in enumerate([ours, *ours.others]):
        last = ends[index]
        found = tokens_of(theirs, index) if stream else list(last.output_ids)
        assert found == list(output.token_ids)
        assert (last.finish_reason, last.prompt_tokens, last.completion_tokens) == ("length", len(PROMPT), 5)
    assert len(theirs) == 2 or stream


async def test_log_probabilities(door: Door) -> None:
    messages = await rest(door.calls.Generate(request(max_tokens=3, seed=1, logprobs=2, prompt_logprobs=1)))
    scores = messages[0].chunk.input_logprobs
    assert list(scores.token_ids) == PROMPT
    assert [one.HasField("value") for one in scores.token_logprobs] == [False] + [True] * (len(PROMPT) - 1)
    assert [list(top.token_ids) for top in scores.top_logprobs] == [[], *([token] for token in PROMPT[1:])]
    for message in messages[:-1]:
        drawn = message.chunk.output_logprobs
        assert list(drawn.token_ids) == list(message.chunk.token_ids)
        assert all(
            top.token_ids[0] == token for top, token in zip(drawn.top_logprobs, drawn.token_ids, strict=True)
        )
        assert all(len(top.values) == 2 for top in drawn.top_logprobs)
    (whole,) = await rest(door.calls.Generate(request(stream=False, max_tokens=3, seed=1, logprobs=0)))
    assert len(whole.complete.output_logprobs.token_logprobs) == 3
    assert not whole.complete.HasField("input_logprobs")


async def test_zero_means_unset(door: Door) -> None:
    sampling = (await door.last_request()).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 40, 1.0)  # the model's
    assert (sampling.repetition_penalty, sampling.min_p) == (1.0, 0.0)
    given = (await door.last_request(temperature=0.0, top_p=0.7, top_k=3, repetition_penalty=1.1)).sampling
    assert (given.temperature, given.top_p, given.top_k, given.repetition_penalty) == (0.0, 0.7, 3, 1.1)


async def test_fields_reach_the_rank(door: Door) -> None:
    got = await door.last_request(
        min_tokens=1, ignore_eos=True, stop_token_ids=[7], stop=["x"], seed=-1, logit_bias={5: 0.3},
        presence_penalty=0.1, frequency_penalty=-0.2, min_p=0.05, include_stop_str_in_output=True,
    )  # fmt: skip
    stopping, sampling = got.stopping, got.sampling
    assert (stopping.min_new_tokens, stopping.eos_token_ids) == (1, frozenset())
    assert (stopping.stop_token_ids, stopping.stop_strings) == (frozenset({7}), ("x",))
    assert stopping.include_stop and sampling.seed == 2**64 - 1 and sampling.logit_bias == ((5, 0.3),)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.min_p) == (0.1, -0.2, 0.05)


async def test_stops_are_named(door: Door) -> None:
    first = by_seed(await door.last_request(seed=9), 0)
    *_, last = await rest(door.calls.Generate(request(max_tokens=9, seed=9, stop_token_ids=[first])))
    assert (last.complete.finish_reason, last.complete.matched_token_id) == ("stop", first)
    *_, last = await rest(door.calls.Generate(request(max_tokens=9, seed=9, stop=[chr(first)])))
    assert (last.complete.finish_reason, last.complete.matched_stop_str) == ("stop", chr(first))


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("json_schema", '{"type":"integer"}', GrammarKind.JSON_SCHEMA),
        ("regex", "[ab]", GrammarKind.REGEX),
        ("grammar", 'root ::= "a"', GrammarKind.EBNF),
        ("choice", pb.ChoiceConstraint(choices=["a", "b"]), GrammarKind.CHOICE),
        ("json_object", True, GrammarKind.JSON_OBJECT),
    ],
)
async def test_constraints_are_grammars(
    door: Door, monkeypatch: pytest.MonkeyPatch, field: str, value: Any, kind: GrammarKind
) -> None:
    asked: list[Grammar] = []

    async def check(grammar: Grammar) -> Grammar:
        asked.append(grammar)
        return grammar

    monkeypatch.setattr(door.served.server._grammars, "check", check)
    got = await door.last_request(**{field: value})
    assert asked == [got.grammar] and got.grammar.kind is kind


def changed(change: Any) -> Any:
    made = request()
    change(made)
    return made


KV_PARAMS = {"do_remote_prefill": True, "remote_handle": "", "remote_port": 1}
REFUSED = {
    "no-input": (lambda r: r.ClearField("tokenized"), "input = None: must be"),
    "empty": (lambda r: r.tokenized.ClearField("input_ids"), "tokenized.input_ids = "),
    "token": (lambda r: r.tokenized.input_ids.append(999), r"tokenized.input_ids[40] = 999"),
    "kv-json": (lambda r: setattr(r, "kv_transfer_params_json", "["), "kv_transfer_params_json = '['"),
    "kv-role": (
        lambda r: setattr(r, "kv_transfer_params_json", '{"do_remote_decode": true}'),
        "kv_transfer_params_json.do_remote_decode = 'true': must be absent: this server has handoff.role",
    ),
    "kv-handle": (
        lambda r: setattr(r, "kv_transfer_params_json", '{"do_remote_prefill": true}'),
        "kv_transfer_params_json.remote_handle = 'None': must be as another ep-server gave it",
    ),
    "kv-host": (
        lambda r: setattr(r, "kv_transfer_params_json", json.dumps({**KV_PARAMS, "remote_host": "\ud800"})),
        r"kv_transfer_params_json.remote_host = '\ud800': must be printable",
    ),
    "kv": (lambda r: r.kv_transfer_params.SetInParent(), "kv_transfer_params = ''"),
    "image": (lambda r: r.mm_inputs.SetInParent(), "mm_inputs = ''"),
    "images": (lambda r: r.extra_mm_inputs.add(), "extra_mm_inputs = "),
    "media": (lambda r: r.media_refs.SetInParent(), "media_refs = ''"),
    "rank": (lambda r: setattr(r, "data_parallel_rank", 7), "data_parallel_rank = 7: must be 0 to 1"),
    "rank-sign": (lambda r: setattr(r, "data_parallel_rank", -1), "data_parallel_rank = -1"),
    "temperature": (
        lambda r: setattr(r.sampling_params, "temperature", -1),
        "sampling_params.temperature = -1.0: must be at least 0",
    ),
    "top-p": (lambda r: setattr(r.sampling_params, "top_p", 2), "sampling_params.top_p = 2.0"),
    "n": (lambda r: setattr(r.sampling_params, "n", 1000), "sampling_params.n = 1000"),
    "max": (lambda r: setattr(r.sampling_params, "max_tokens", 0), "sampling_params.max_tokens = 0"),
    "stop": (lambda r: r.sampling_params.stop.append(""), "sampling_params.stop = ''"),
    "stops": (
        lambda r: r.sampling_params.stop.extend(["x"] * 10_000),
        "sampling_params.stop = '10000 strings': must be at most 16 strings",
    ),
    "logprobs": (lambda r: setattr(r.sampling_params, "logprobs", 21), "sampling_params.logprobs = 21"),
    "all": (lambda r: setattr(r.sampling_params, "logprobs", -1), "sampling_params.logprobs = -1"),
    "prompt": (
        lambda r: setattr(r.sampling_params, "prompt_logprobs", 21),
        "sampling_params.prompt_logprobs = 21",
    ),
    "bias": (lambda r: r.sampling_params.logit_bias.update({-1: 1.0}), "sampling_params.logit_bias = -1"),
    "bias-size": (
        lambda r: r.sampling_params.logit_bias.update({5: 101.0}),
        "sampling_params.logit_bias[5] = 101.0: must be -100 to 100",
    ),
    "truncate": (
        lambda r: setattr(r.sampling_params, "truncate_prompt_tokens", 3),
        "sampling_params.truncate_prompt_tokens = 3",
    ),
    "choice": (lambda r: r.sampling_params.choice.SetInParent(), "sampling_params.choice.choices = []"),
    "object": (
        lambda r: setattr(r.sampling_params, "json_object", False),
        "sampling_params.json_object = False",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_it_cannot_express_is_refused_by_name(door: Door, case: str) -> None:
    change, words = REFUSED[case]
    error = await failure(door.calls.Generate(changed(change)))
    assert error.code() is Code.INVALID_ARGUMENT and (error.details() or "").startswith(words)
    assert trailers(error)["epserver-field"] == words.partition(" ")[0]


async def test_a_length_beyond_the_context_names_its_field(door: Door) -> None:
    error = await failure(door.calls.Generate(request(max_tokens=70_000)))
    assert error.code() is Code.OUT_OF_RANGE
    assert "sampling_params.max_tokens = 70000" in (error.details() or "")


async def test_a_long_message_is_counted_before_it_is_decoded(door: Door) -> None:
    error = await failure(door.calls.Generate(request([1] * 70_000)))
    assert error.code() is Code.OUT_OF_RANGE and "prompt of 70000 tokens" in (error.details() or "")
    bias = dict.fromkeys(range(MAX_LOGIT_BIAS + 8000), 1.0)
    error = await failure(door.calls.Generate(request(logit_bias=bias)))
    assert (error.details() or "").startswith("sampling_params.logit_bias = ")


async def test_a_closed_stream_frees_its_blocks_with_the_next_step() -> None:
    async with opened() as door:
        door.served.ranks.hold()
        call = door.calls.Generate(request())
        await door.served.until(lambda: door.served.server.engine.statistics().in_flight == 1)
        door.served.ranks.step()
        await next_event(call)
        call.cancel()
        await door.served.until(lambda: door.served.ranks.cancelled == [1])
        door.served.ranks.step()
        assert door.served.server.engine.statistics().in_flight == 0
        door.served.ranks.check_integrity(idle=True)
        door.served.ranks.release()


async def test_abort_ends_a_stream() -> None:
    async with opened() as door:
        door.served.ranks.hold()
        asked = request()
        asked.request_id = "mine"
        call = door.calls.Generate(asked)
        await door.served.until(lambda: door.served.server.engine.statistics().in_flight == 1)
        await door.calls.Abort(pb.AbortRequest(request_ids=["mine", "unknown"]))
        assert (await failure(call)).code() is Code.CANCELLED
        door.served.ranks.release()
        error = await failure(door.calls.Abort(pb.AbortRequest(request_ids=["x"] * 1025)))
        assert error.details() == "request_ids = '1025 ids': must be at most 1024"


async def test_acting_on_others_needs_control() -> None:
    calls = {
        "Abort": pb.AbortRequest(),
        "FlushCache": common.FlushCacheRequest(),
        "StartProfile": common.StartProfileRequest(),
        "StopProfile": common.StopProfileRequest(),
    }
    async with opened(grpc__control="off") as door:
        for name, message in calls.items():
            error = await failure(getattr(door.calls, name)(message))
            assert error.code() is Code.UNIMPLEMENTED
            assert error.details() == f"{name} is switched off at this server (grpc.control = off)"


async def test_the_server_and_its_model_are_described(door: Door) -> None:
    assert (await door.calls.HealthCheck(pb.HealthCheckRequest())).healthy
    model = await door.calls.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.served_model_name, model.vocab_size, model.is_generation) == ("fake", 257, True)
    assert (model.model_path, list(model.eos_token_ids)) == (str(DEMO), [256])
    assert json.loads(model.default_sampling_params_json) == {"temperature": 0.5, "top_k": 40}
    info = await door.calls.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.data_parallel_size, info.block_size, info.server_type) == (2, 16, "ep-server")
    loads = await door.calls.GetLoads(pb.GetLoadsRequest())
    assert [load.dp_rank for load in loads.loads] == [0, 1] and loads.dp_rank_count == 2
    one = await door.calls.GetLoads(pb.GetLoadsRequest(dp_rank=1))
    assert [load.max_total_num_tokens for load in one.loads] == [4096 * 16]
    error = await failure(door.calls.GetLoads(pb.GetLoadsRequest(dp_rank=2)))
    assert error.details() == "dp_rank = 2: must be 0 to 1"


async def test_the_tokenizer_is_a_zip_archive(door: Door) -> None:
    parts = await rest(door.calls.GetTokenizer(common.GetTokenizerRequest()))
    data = b"".join(part.data for part in parts)
    assert [part.sha256 for part in parts][:-1] == [""] * (len(parts) - 1)
    assert parts[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.read("tokenizer.json") == (DEMO / "tokenizer.json").read_bytes()
        assert {"chat_template.jinja", "config.json"} <= set(archive.namelist())


async def test_no_tokenizer_is_not_found() -> None:
    async with opened(model__path="") as door:
        assert (await failure(door.calls.GetTokenizer(common.GetTokenizerRequest()))).code() is Code.NOT_FOUND


async def test_kv_events_follow_the_prefix_cache() -> None:
    async with opened() as door:
        call = door.calls.SubscribeKvEvents(common.SubscribeKvEventsRequest())
        first = await next_event(call)
        assert first.events[0].HasField("cleared") and (first.snapshot.index, first.dp_rank) == (0, 0)
        await rest(door.calls.Generate(request(max_tokens=1)))
        batch = await next_event(call)
        (stored,) = [event.stored for event in batch.events if event.HasField("stored")]
        assert not stored.HasField("parent_block_hash")
        assert [list(block.token_ids) for block in stored.blocks] == [PROMPT[:16], PROMPT[16:32]]
        flushed = await door.calls.FlushCache(common.FlushCacheRequest(timeout_s=5))
        assert flushed.success and flushed.message == "2 blocks forgotten"
        assert (await next_event(call)).events[0].HasField("cleared")
        call.cancel()


async def test_profiles_need_a_folder_and_its_options() -> None:
    async with opened() as door:
        error = await failure(door.calls.StartProfile(common.StartProfileRequest()))
        assert error.code() is Code.UNIMPLEMENTED and "profile.directory" in (error.details() or "")
    async with opened(profile__directory="profiles") as door:
        error = await failure(door.calls.StartProfile(common.StartProfileRequest(output_dir="x")))
        assert (error.details() or "").startswith("output_dir = 'x': must be absent")
        begun = await door.calls.StartProfile(common.StartProfileRequest(num_steps=3))
        name = begun.message.split()[1]
        ended = await door.calls.StopProfile(common.StopProfileRequest())
        assert begun.success and ended.message.startswith(name)


async def test_calls_without_a_counterpart_are_unimplemented(door: Door) -> None:
    error = await failure(door.calls.Embed(pb.EmbedRequest()))
    assert error.code() is Code.UNIMPLEMENTED and "Embed" in (error.details() or "")
    scheduler: Any = SglangSchedulerStub(door.channel)  # gateways ask for it first
    error = await failure(scheduler.GetModelInfo(foreign.GetModelInfoRequest()))
    assert error.code() is Code.UNIMPLEMENTED


async def test_it_is_healthy_while_lost_ranks_are_replaced() -> None:
    ranks = FakeRanks(2)
    async with opened(ranks, resilience__on_rank_loss="recover") as door:
        ranks.start_gate = asyncio.Event()
        ranks.kill(0)
        health = await door.calls.HealthCheck(pb.HealthCheckRequest())
        assert health.healthy and not health.message
        waiting = asyncio.ensure_future(rest(door.calls.Generate(request(max_tokens=5))))
        await door.served.until(lambda: door.served.heard.admitted == 1)
        ranks.start_gate.set()
        assert len(tokens_of(await waiting)) == 5


async def test_another_node_relays_it() -> None:
    async with relayed() as both, grpc.aio.insecure_channel(both.node.client.target.address) as channel:
        ours = await both.served.client.complete(PROMPT, max_new_tokens=5, seed=3)
        far: Any = VllmEngineStub(channel)
        theirs = await asyncio.wait_for(rest(far.Generate(request(max_tokens=5, seed=3))), 30)
        assert tokens_of(theirs) == list(ours.token_ids)
        assert (await far.HealthCheck(pb.HealthCheckRequest())).healthy
        await both.served.until(lambda: both.node.heard.ended == ["OK"])
