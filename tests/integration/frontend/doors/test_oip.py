"""The Open Inference Protocol with stock tritonclient, over FakeRanks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc as blocking
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import aio, service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from ep_server.frontend.doors import oip
from ep_server.frontend.doors.oip import sampling
from ep_server.records import Grammar, GrammarKind
from ep_server.testing.fake_ranks import FakeRanks
from ep_server.text.grammars.compiler import GrammarCompiler
from tests.support.doors.oip import message, outputs, streamed, tensors, typed, wanted
from tests.support.frontend import WAIT, Served, failure, serving, trailers

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/inference.GRPCInferenceService/"


@dataclass
class Open:
    """A server, stock clients of it, and one that sends what it likes."""

    served: Served
    client: aio.InferenceServerClient
    channel: grpc.aio.Channel
    stub: Any

    async def last_request(self, **inputs: Any) -> Any:
        """What the rank gets for this request."""
        await self.client.infer("fake", tensors(**inputs))
        return list(self.served.ranks.requests.values())[-1]


def by_seed(request: Any, index: int) -> int:
    """Tokens of their own for each seed and each place."""
    return ((request.sampling.seed or 0) * 7 + request.prompt_ids[-1] + index) % 128


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door() -> AsyncIterator[Open]:
    async with serving(FakeRanks(2, next_token=by_seed), grpc__max_message_bytes=1 << 20) as served:
        address = served.server.address
        async with (
            aio.InferenceServerClient(address) as client,
            grpc.aio.insecure_channel(address) as own,
        ):
            stub = service_pb2_grpc.GRPCInferenceServiceStub(own)
            yield Open(served, client, own, stub)


async def test_the_server_describes_itself_and_its_model(door: Open) -> None:
    client = door.client
    assert await client.is_server_live() and await client.is_server_ready()
    assert await client.is_model_ready("fake") and await client.is_model_ready("fake", "1")
    assert not await client.is_model_ready("other") and not await client.is_model_ready("fake", "2")
    assert (await client.get_server_metadata()).name == "ep_server"
    metadata = await client.get_model_metadata("fake")
    config = (await client.get_model_config("fake")).config
    assert config.model_transaction_policy.decoupled and config.max_batch_size == 0
    assert [tensor.name for tensor in metadata.inputs] == [tensor.name for tensor in config.input]
    assert {tensor.name: tensor.datatype for tensor in metadata.outputs}["num_output_tokens"] == "UINT32"
    [model] = (await client.get_model_repository_index()).models
    assert (model.name, model.version, model.state) == ("fake", "1", "READY")
    asked = health_pb2.HealthCheckRequest(service=oip.SERVICE.full_name)
    status = await health_pb2_grpc.HealthStub(door.channel).Check(asked)
    assert status.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(InferenceServerException, match=r"NOT_FOUND.*'other' is not served"):
        await client.get_model_metadata("other")


async def test_it_is_ready_while_lost_ranks_are_replaced() -> None:
    ranks = FakeRanks(2)
    async with serving(ranks, resilience__on_rank_loss="recover") as served:
        ranks.start_gate = asyncio.Event()
        ranks.kill(0)
        async with aio.InferenceServerClient(served.server.address) as client:
            assert await client.is_server_ready() and await client.is_model_ready("fake")
            few = tensors(text_input="abc", sampling_parameters={"max_tokens": 2})
            waiting = asyncio.ensure_future(client.infer("fake", few))
            await served.until(lambda: served.heard.admitted == 1)
            ranks.start_gate.set()
            await waiting


async def test_a_blocking_client_gets_the_text_of_decode(door: Open) -> None:
    fields = {"max_new_tokens": 6, "seed": 3, "temperature": 0.7}
    expected = await door.served.client.complete("abc", **fields)
    parameters = {"max_tokens": 6, "seed": 3, "temperature": 0.7}
    names = ("finish_reason", "num_input_tokens", "num_output_tokens")
    flags = {f"return_{name}": True for name in names}
    inputs = tensors(text_input="abc", sampling_parameters=parameters, **flags)

    def ask() -> Any:
        with blocking.InferenceServerClient(door.served.server.address) as client:
            return client.infer("fake", inputs, request_id="not unique, any text")

    result = await asyncio.to_thread(ask)
    assert outputs(result) == {
        "text_output": ["abc" + expected.text],
        "finish_reason": ["length"],
        "num_input_tokens": [3],
        "num_output_tokens": [6],
    }
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("not unique, any text", "fake", "1")


async def test_a_blocking_stream_calls_back_with_each_token(door: Open) -> None:
    expected = await door.served.client.complete("abc", max_new_tokens=5, seed=4)
    pairs: list[tuple[Any, Any]] = []

    def ask() -> None:
        with blocking.InferenceServerClient(door.served.server.address) as client:
            client.start_stream(lambda result, error: pairs.append((result, error)))
            parameters = {"max_tokens": 5, "seed": 4}
            inputs = tensors(text_input="abc", stream=True, sampling_parameters=parameters)
            client.async_stream_infer("fake", inputs, request_id="7", enable_empty_final_response=True)
            client.stop_stream()

    await asyncio.to_thread(ask)
    assert not any(error for _, error in pairs)
    assert "".join(outputs(result)["text_output"][0] for result, _ in pairs) == expected.text
    final = [r.get_response().parameters["triton_final_response"].bool_param for r, _ in pairs]
    assert final == [False] * (len(pairs) - 1) + [True]


async def test_requests_of_one_stream_fail_each_for_itself(door: Open) -> None:
    def asked(name: str, tokens: int, **more: Any) -> dict[str, Any]:
        parameters = {"max_tokens": tokens, "seed": 1}
        return {
            "request_id": name,
            "inputs": tensors(text_input=name, sampling_parameters=parameters, **more),
        }

    pairs = await streamed(
        door.client, asked("a", 4, stream=True), asked("b", 0), asked("c", 3), asked("d", 2, stream=True)
    )
    errors = [error for _, error in pairs if error is not None]
    assert [str(error) for error in errors] == ["sampling_parameters.max_tokens = 0: must be at least 1"]
    parts: dict[str, list[str]] = {}
    for result, error in pairs:
        if error is None:
            parts.setdefault(result.get_response().id, []).extend(outputs(result)["text_output"])
    assert set(parts) == {"a", "c", "d"} and len(parts["c"]) == 1
    for name, tokens in (("a", 4), ("d", 2)):
        expected = await door.served.client.complete(name, max_new_tokens=tokens, seed=1)
        assert "".join(parts[name]) == expected.text
    with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
        await streamed(door.client, asked("e", 0), headers={"triton_grpc_error": "true"})


async def test_a_failed_request_is_named_in_its_message(door: Open) -> None:
    async def requests() -> AsyncIterator[Any]:
        request = message(text_input="a", sampling_parameters={"max_tokens": 0})
        request.id = "mine"
        yield request

    [answer] = [answer async for answer in door.stub.ModelStreamInfer(requests())]
    assert answer.error_message and answer.infer_response.id == "mine"
    assert answer.infer_response.parameters["triton_final_response"].bool_param


async def test_token_ids_go_in_and_come_out(door: Open) -> None:
    expected = await door.served.client.complete([7, 8, 9], max_new_tokens=4, seed=2)
    request = message(input_ids=[7, 8, 9], sampling_parameters={"max_tokens": 4, "seed": 2})
    flat = message(input_ids=[7, 8, 9], sampling_parameters={"max_tokens": 4, "seed": 2})
    flat.inputs[0].shape[:] = [1, 3]
    narrow = message(input_ids=[7, 8, 9], sampling_parameters={"max_tokens": 4, "seed": 2})
    narrow.inputs[0].datatype = "INT32"
    narrow.raw_input_contents[0] = np.array([7, 8, 9], np.int32).tobytes()
    for each in (request, typed(request), flat, typed(flat), narrow):
        result = blocking.InferResult(await door.stub.ModelInfer(each))
        assert outputs(result) == {"output_ids": list(expected.token_ids)}
    pair = {
        "inputs": tensors(input_ids=[7, 8, 9], stream=True, sampling_parameters={"max_tokens": 4, "seed": 2})
    }
    pairs = await streamed(door.client, pair | {"outputs": wanted("output_ids", "text_output")})
    assert [token for result, _ in pairs for token in outputs(result)["output_ids"]] == list(
        expected.token_ids
    )
    assert "".join(outputs(result)["text_output"][0] for result, _ in pairs) == expected.text


async def test_listed_outputs_are_those_returned(door: Open) -> None:
    inputs = tensors(
        text_input="abc",
        exclude_input_in_output=True,
        sampling_parameters={"max_tokens": 2, "n": 3, "seed": 5},
    )
    result = await door.client.infer(
        "fake", inputs, outputs=wanted("num_output_tokens", "text_output", "logprobs")
    )
    found = outputs(result)
    assert list(found) == ["num_output_tokens", "text_output", "logprobs"]
    assert found["num_output_tokens"] == [2, 2, 2]
    expected = await door.served.client.complete("abc", max_new_tokens=2, num_sequences=3, seed=5)
    assert found["text_output"] == [output.text for output in (expected, *expected.others)]
    scores = json.loads(found["logprobs"][0])
    ids = [next(iter(score)) for score in scores]
    assert ids == [str(token) for token in expected.token_ids]
    assert all(set(next(iter(score.values()))) == {"logprob", "rank", "decoded_token"} for score in scores)


async def test_every_sampling_parameter_reaches_the_rank(door: Open) -> None:
    given = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 9,
        "min_p": 0.1,
        "seed": 11,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.75,
        "logit_bias": {"5": -3},
        "allowed_token_ids": [1, 2, 3],
        "n": 1,
        "max_tokens": 3,
        "min_tokens": 2,
        "stop": ["zz", "yy"],
        "stop_token_ids": [200],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "logprobs": 2,
    }
    assert {*given, "structured_outputs", "guided_decoding"} == set(sampling.KEYS)
    request = await door.last_request(text_input="a", sampling_parameters=given)
    drawn, ends = request.sampling, request.stopping
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "logprobs"):
        assert getattr(drawn, name) == given[name]
    assert (drawn.presence_penalty, drawn.frequency_penalty) == (-0.5, 0.75)
    assert drawn.logit_bias == ((5, -3.0),) and drawn.allowed_token_ids == (1, 2, 3)
    assert (ends.max_new_tokens, ends.min_new_tokens, ends.include_stop) == (3, 2, True)
    assert ends.stop_strings == ("zz", "yy") and ends.stop_token_ids == {200} and not ends.eos_token_ids


GRAMMARS = {
    "json": ({"type": "null"}, GrammarKind.JSON_SCHEMA, '{"type": "null"}'),
    "json_object": (True, GrammarKind.JSON_OBJECT, ""),
    "regex": ("[ab]+", GrammarKind.REGEX, "[ab]+"),
    "choice": (["a", "b"], GrammarKind.CHOICE, '["a", "b"]'),
    "grammar": ('root ::= "a"', GrammarKind.EBNF, 'root ::= "a"'),
    "structural_tag": ("{}", GrammarKind.STRUCTURAL_TAG, "{}"),
}


@pytest.mark.parametrize("key", GRAMMARS)
async def test_structured_outputs_become_a_grammar(
    door: Open, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, kind, source = GRAMMARS[key]
    found: list[Grammar] = []

    async def check(_self: Any, grammar: Grammar) -> None:
        found.append(grammar)

    monkeypatch.setattr(GrammarCompiler, "check", check)
    for given in ({key: value}, json.dumps({key: value, "regex" if key == "json" else "json": None})):
        for name in ("structured_outputs", "guided_decoding"):
            await door.last_request(text_input="a", sampling_parameters={"max_tokens": 1, name: given})
    assert found == [Grammar(kind, source)] * 4


async def test_parameters_may_stand_in_for_the_tensor(door: Open) -> None:
    text = {"temperature": "0.25", "max_tokens": "3", "ignore_eos": "True", "top_k": "-1", "stop": "zz"}
    await door.client.infer("fake", tensors(text_input="a"), parameters=text, priority=2)
    request = list(door.served.ranks.requests.values())[-1]
    assert (request.sampling.temperature, request.sampling.top_k) == (0.25, 0)
    assert (request.stopping.max_new_tokens, request.stopping.stop_strings) == (3, ("zz",))
    assert not request.stopping.eos_token_ids and request.priority == 3
    with pytest.raises(InferenceServerException, match=r"parameters\.max_tokens.*absent beside sampling_"):
        both = tensors(text_input="a", sampling_parameters={"max_tokens": 3})
        await door.client.infer("fake", both, parameters={"max_tokens": 3})


async def test_a_timeout_in_microseconds_ends_the_request(door: Open) -> None:
    door.served.ranks.hold()
    inputs = tensors(text_input="a", sampling_parameters={"max_tokens": 2})
    try:
        with pytest.raises(InferenceServerException, match="DEADLINE_EXCEEDED"):
            await door.client.infer("fake", inputs, timeout=20_000)
        [(_, error)] = await streamed(door.client, {"inputs": inputs, "timeout": 20_000})
        assert "deadline" in str(error)
    finally:
        door.served.ranks.release()
    await door.served.idle()


async def test_closing_the_stream_cancels_its_requests(door: Open) -> None:
    ranks, engine = door.served.ranks, door.served.server.engine
    started = asyncio.Event()

    async def requests() -> AsyncIterator[Any]:
        for _ in range(2):
            yield message(text_input="a", stream=True, sampling_parameters={"max_tokens": 1000})
        await started.wait()

    before = (await door.client.get_inference_statistics("fake")).model_stats[0].inference_stats
    ranks.hold()
    call = door.stub.ModelStreamInfer(requests())
    await door.served.until(lambda: engine.statistics().in_flight == 2)
    ranks.step()
    async with asyncio.timeout(WAIT):
        assert (await call.read()).infer_response.outputs
    call.cancel()
    await door.served.until(lambda: engine.statistics().open_streams == 0)
    ranks.release()
    await door.served.idle()
    after = (await door.client.get_inference_statistics("fake")).model_stats[0].inference_stats
    assert after.fail.count - before.fail.count == 2 and after.success.count == before.success.count


async def test_statistics_count_what_was_asked(door: Open) -> None:
    before = (await door.client.get_inference_statistics("fake")).model_stats[0]
    good = {"inputs": tensors(text_input="a", sampling_parameters={"max_tokens": 2})}
    await streamed(door.client, good, good, {"inputs": tensors(text_input="")})
    await door.client.infer("fake", good["inputs"])
    after = (await door.client.get_inference_statistics("fake")).model_stats[0]
    assert after.inference_count - before.inference_count == 3
    assert after.inference_stats.fail.count - before.inference_stats.fail.count == 1
    assert after.inference_stats.success.ns > before.inference_stats.success.ns and after.last_inference


async def test_calls_without_a_counterpart_are_refused_by_name(door: Open) -> None:
    with pytest.raises(InferenceServerException, match=r"UNIMPLEMENTED.*ModelLoad is not supported"):
        await door.client.load_model("fake")
    served = vars(oip.InferenceService)
    for method in oip.SERVICE.methods:
        assert method.name in served
    refused = [name for name, call in served.items() if getattr(call, "__name__", "") == "refused"]
    assert len(refused) == 10
    for name in refused:
        error = await failure(door.channel.unary_unary(PATH + name)(b""))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED and error.details().startswith(name)


def shaped(*shape: int) -> Any:
    return lambda request: request.inputs[0].shape.__setitem__(slice(None), shape)


def raw(data: bytes, index: int = 0) -> Any:
    return lambda request: request.raw_input_contents.__setitem__(index, data)


def parameters(text: str | bytes | Mapping[str, Any]) -> Any:
    given = text if isinstance(text, str | bytes) else json.dumps(text)
    data = given.encode() if isinstance(given, str) else given

    def change(request: Any) -> None:
        request.raw_input_contents[1] = len(data).to_bytes(4, "little") + data

    return change


def added(name: str, value: Any) -> Any:
    return lambda request: request.MergeFrom(message(**{name: value}))


def parameter(name: str, **value: Any) -> Any:
    return lambda request: request.parameters[name].CopyFrom(service_pb2.InferParameter(**value))


HOSTILE = {
    "negative-shape": (shaped(-1), r"text_input.shape = \[-1\]: must be \[1\]"),
    "batch": (shaped(2), "a message is one request, not a batch"),
    "batch-of-rows": (shaped(2, 1), "a message is one request, not a batch"),
    "no-shape": (shaped(), "text_input.shape"),
    "many-dimensions": (shaped(*[1] * 5000), "text_input.shape"),
    "no-length": (raw(b"ab"), "text_input = '2 bytes': must be one string: its length"),
    "long-length": (raw(b"\xff\xff\xff\xffab"), "text_input = '6 bytes'"),
    "short-length": (raw(b"\1\0\0\0ab"), "text_input = '6 bytes'"),
    "no-utf8": (raw(b"\2\0\0\0\xc3\x28"), "text_input .* UTF-8 text"),
    "empty-text": (raw(b"\0\0\0\0"), "text_input = ''"),
    "wrong-type": (lambda r: setattr(r.inputs[0], "datatype", "FP32"), "text_input.datatype = 'FP32'"),
    "no-raw": (lambda r: r.raw_input_contents.pop(), "raw_input_contents = '1 buffers'"),
    "raw-and-typed": (
        lambda r: r.inputs[0].contents.bytes_contents.append(b"a"),
        "text_input.contents = 'given': must be absent beside",
    ),
    "unknown-input": (lambda r: setattr(r.inputs[0], "name", "image"), "inputs.name = 'image'"),
    "same-input-twice": (added("text_input", "a"), "inputs.name = 'text_input': must be each given once"),
    "both-prompts": (added("input_ids", [1]), "inputs = 'both'"),
    "stream-without-stream": (added("stream", True), "stream = True: must be false in ModelInfer"),
    "shared-memory": (
        lambda r: r.inputs[0].parameters["shared_memory_region"].CopyFrom(service_pb2.InferParameter()),
        "text_input.parameters = 'shared_memory_region'",
    ),
    "unknown-output": (lambda r: r.outputs.add(name="embedding"), "outputs.name = 'embedding'"),
    "classification": (
        lambda r: (
            r.outputs.add(name="text_output")
            .parameters["classification"]
            .CopyFrom(service_pb2.InferParameter(int64_param=3))
        ),
        "text_output.parameters = 'classification'",
    ),
    "not-json": (parameters("{"), "sampling_parameters = '{': must be a JSON object"),
    "no-object": (parameters("[1]"), "a JSON object"),
    "long-json": (parameters(" " * 700_000), "sampling_parameters = '700000 bytes': must be at most"),
    "deep-json": (parameters('{"stop":' + "[" * 100_000), "less deeply nested"),
    "huge-integer": (parameters('{"seed":' + "9" * 5000 + "}"), "sampling_parameters"),
    "huge-exponent": (parameters('{"temperature":1e999}'), "temperature = inf"),
    "nan": (parameters('{"temperature":NaN}'), "NaN is not JSON"),
    "lone-surrogate": (parameters('{"stop":"\\ud800"}'), "stop = .*lone surrogates"),
    "stop-strings": (parameters({"stop": ["x"] * 10_000}), "sampling_parameters.stop = '10000 strings'"),
    "unknown-key": (parameters({"best_of": 2}), "sampling_parameters.best_of = 2: must be absent; known"),
    "odd-key": (parameters('{"\\ud800\\u00fc\\n":1}'), r"sampling_parameters.\\ud800\\xfc\\n = 1"),
    "odd-parameter": (parameter("ü\n", int64_param=1), r"parameters.\\xfc\\n = 1"),
    "wrong-kind": (parameters({"max_tokens": [1]}), "max_tokens = 'list of 1'"),
    "boolean-number": (parameters({"max_tokens": True}), "max_tokens = True"),
    "big-token": (parameters({"stop_token_ids": [2**32]}), "stop_token_ids = 4294967296"),
    "bias-of-text": (parameters({"logit_bias": {"a": 1}}), "logit_bias = "),
    "broken-regex": (
        parameters({"structured_outputs": {"regex": "("}}),
        r"sampling_parameters.structured_outputs.regex = '\('",
    ),
    "two-grammars": (
        parameters({"guided_decoding": {"regex": "a", "choice": ["b"]}}),
        "sampling_parameters.guided_decoding = 'regex, choice': must be an object with one of",
    ),
    "grammar-twice": (
        parameters({"guided_decoding": {"regex": "a"}, "structured_outputs": {"regex": "a"}}),
        "structured_outputs = .*absent beside sampling_parameters.guided_decoding",
    ),
    "deep-schema": (
        parameters({"structured_outputs": {"json": '{"not":' * 10_000 + "1" + "}" * 10_000}}),
        "sampling_parameters.structured_outputs.json = ",
    ),
    "negative-n": (parameters({"n": -1}), "sampling_parameters.n = -1"),
    "unknown-parameter": (parameter("headers", string_param="x"), "parameters.headers"),
    "empty-parameter": (parameter("seed"), "parameters.seed = None"),
    "sequence": (parameter("sequence_id", int64_param=4), "parameters.sequence_id = 4: must be absent"),
    "bad-priority": (parameter("priority", uint64_param=10), "parameters.priority = 10"),
    "bad-timeout": (parameter("timeout", int64_param=-1), "parameters.timeout = -1"),
}


@pytest.mark.parametrize(("change", "details"), HOSTILE.values(), ids=HOSTILE.keys())
async def test_bad_input_is_refused_by_name(door: Open, change: Any, details: str) -> None:
    request = message(text_input="abc", sampling_parameters={"max_tokens": 2})
    change(request)
    error = await failure(door.stub.ModelInfer(request))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert trailers(error)["epserver-error"] == "InvalidArgument"
    with pytest.raises(InferenceServerException, match=f"(?s){details}"):
        raise InferenceServerException(error.details())
    assert len(error.details()) < 2000


TOKENS = {
    "negative-token": ([-1], None, r"input_ids\[0\] = -1: must be a token id"),
    "unknown-token": ([5, 300], None, r"input_ids\[1\] = 300: must be 0 to 256"),
    "huge-shape": ([1], [2**62], r"input_ids = '1 elements': must be as many as its shape"),
    "half-a-token": ([1], b"\0\0\0", "input_ids = '3 bytes': must be a multiple of 8 bytes"),
    "two-sequences": ([[1], [2]], None, "input_ids.shape"),
    "zero-tokens": ([1], [0], "input_ids.shape"),
}


@pytest.mark.parametrize(("ids", "other", "details"), TOKENS.values(), ids=TOKENS.keys())
async def test_bad_token_ids_are_refused_by_name(door: Open, ids: Any, other: Any, details: str) -> None:
    request = message(input_ids=ids)
    if isinstance(other, bytes):
        request.raw_input_contents[0] = other
    elif other is not None:
        request.inputs[0].shape[:] = other
    error = await failure(door.stub.ModelInfer(request))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(InferenceServerException, match=details):
        raise InferenceServerException(error.details())


async def test_limits_hold_for_each_message_of_a_stream(door: Open) -> None:
    large = message(text_input="x" * (1 << 20))
    crowded = message(text_input="x" * 70_000)
    for _ in range(10):
        crowded.inputs.add(name="text_input")
    late = door.stub.ModelStreamInfer(
        iter([message(text_input="a", sampling_parameters={"max_tokens": 1}), large])
    )
    error = await failure(late)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "at most 1048576" in error.details()
    error = await failure(door.stub.ModelStreamInfer(iter([crowded])))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "inputs = '11 elements'" in error.details()
    broken = door.channel.stream_stream(f"{PATH}ModelStreamInfer")(iter([b"\xff\xff"]))
    assert (await failure(broken)).code() is grpc.StatusCode.INVALID_ARGUMENT
    await door.served.idle()
