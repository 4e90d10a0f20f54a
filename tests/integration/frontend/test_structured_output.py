"""Grammars from the call to the ranks: what a model of random weights draws at temperature 1 matches them."""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from ep_server.config import Config
from ep_server.frontend.served_model import ServedModel
from ep_server.frontend.server import Server
from ep_server.ranks.launcher import RankProcesses
from ep_server.v1 import decode_pb2 as pb
from tests.support.frontend import Code, failure
from tests.support.raw_client import RawClient
from tests.support.structured import DEMO, byte_checkpoint
from tests.support.tokenizers import EOS

pytestmark = pytest.mark.asyncio(loop_scope="module")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}]},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
SUM = 'root ::= term ("+" term)*\nterm ::= [0-9]{1,3} | "(" root ")"'
CALLS = {
    "structures": [
        {"begin": "<call=a>", "schema": {"type": "integer"}, "end": "</call>"},
        {"begin": "<call=b>", "schema": {"type": "boolean"}, "end": "</call>"},
    ],
    "triggers": ["<call="],
}
CALL = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<call="],
        "tags": [
            {
                "type": "tag",
                "begin": "<call=a>",
                "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
                "end": "</call>",
            }
        ],
        "at_least_one": True,
        "stop_after_first": True,
    },
}


@dataclass
class Model:
    """A served checkpoint."""

    client: RawClient
    server: Server

    async def text(self, seed: int, **fields: Any) -> str:
        """Of an output that ended by its grammar."""
        output = await self.client.complete([1], seed=seed, temperature=1.0, **fields)
        assert output.finished.reason == pb.FINISH_REASON_EOS, output.text
        assert output.finished.token_id in (EOS, 14)
        return output.text


async def served(path: Any, **values: Any) -> AsyncIterator[Model]:
    config = Config.from_values(
        {
            "model.path": str(path),
            "grpc.port": 0,
            "parallel.ranks": 2,
            "parallel.threads_per_rank": 1,
            "scheduler.kv_blocks": 1024,
            **values,
        }
    )
    server = Server(config, ServedModel.load(config.model), RankProcesses(config))
    try:
        await server.start(lambda *_: None)
        async with RawClient(server.address) as client:
            yield Model(client, server)
    finally:
        await server.drain()
        await server.stop()
    assert not server.engine.lost_message


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Model]:
    path = byte_checkpoint(tmp_path_factory.mktemp("bytes"))
    async for each in served(path, **{"model.load_format": "dummy"}):
        yield each


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def demo() -> AsyncIterator[Model]:
    async for each in served(DEMO):
        yield each


async def test_json_is_valid_under_its_schema(model: Model) -> None:
    grammar = pb.Grammar(json_schema=json.dumps(PERSON))
    for text in await asyncio.gather(*(model.text(seed, grammar=grammar) for seed in range(16))):
        jsonschema.validate(json.loads(text), PERSON)


async def test_demo_model_at_temperature_one(demo: Model) -> None:
    """It has digits and signs alone, so its JSON is numbers."""
    schema = {"type": "integer", "minimum": -50, "maximum": 999}
    grammar = pb.Grammar(json_schema=json.dumps(schema))
    texts = await asyncio.gather(*(demo.text(seed, grammar=grammar) for seed in range(200)))
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
    assert len(set(texts)) > 10


async def test_regex_choice_and_ebnf_hold(model: Model) -> None:
    assert re.fullmatch(
        "[a-f]{3,9}-[0-9]+", await model.text(1, grammar=pb.Grammar(regex="^[a-f]{3,9}-[0-9]+$"))
    )
    choices = ["ja", "jawohl", 'größer "als" \\']
    choice = pb.Grammar(choice=pb.Choices(choices=choices))
    assert {await model.text(seed, grammar=choice) for seed in range(12)} == set(choices)
    for seed in range(4):
        text = await model.text(seed, grammar=pb.Grammar(ebnf=SUM), max_new_tokens=1000)
        assert re.fullmatch(r"[0-9+()]+", text)
        ast.parse(re.sub(r"\d+", "1", text), mode="eval")


async def test_structural_tags_hold(model: Model) -> None:
    text = await model.text(3, grammar=pb.Grammar(structural_tag=json.dumps(CALL)))
    assert re.fullmatch(r"<call=a>-?[0-9]+</call>", text)
    pushed = {ord("<"): 6.0, ord("c"): 3.0, EOS: -4.0}
    for seed in range(4):
        output = await model.client.complete(
            [1],
            seed=seed,
            temperature=1.0,
            logit_bias=pushed,
            max_new_tokens=60,
            grammar=pb.Grammar(structural_tag=json.dumps(CALLS)),
        )
        for call in output.text.split("<call=")[1:]:
            assert re.match(r"(a>\s*-?([0-9]|$)|b>\s*(t|f|$)|a$|b$|$)", call), output.text


async def test_json_object_and_a_length_that_cuts(model: Model) -> None:
    grammar = pb.Grammar(json_object=True)
    output = await model.client.complete([1], seed=1, temperature=1.0, grammar=grammar, max_new_tokens=5)
    assert output.text.startswith("{")
    if output.finished.reason != pb.FINISH_REASON_EOS:
        assert output.finished.reason == pb.FINISH_REASON_LENGTH
    digits = pb.Grammar(regex="[0-9]{50}")
    output = await model.client.complete([1], seed=1, temperature=1.0, grammar=digits, max_new_tokens=5)
    assert output.finished.reason == pb.FINISH_REASON_LENGTH and output.text.isdigit()


async def test_neighbours_without_a_grammar_draw_the_same(model: Model) -> None:
    fields = {"temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True, "dp_rank": 0}
    alone = [await model.client.complete([1, 2], seed=seed, **fields) for seed in range(3)]
    grammar = pb.Grammar(json_schema=json.dumps(PERSON))
    free = [model.client.complete([1, 2], seed=seed, **fields) for seed in range(3)]
    bound = [model.client.complete([3], seed=seed, grammar=grammar, dp_rank=0) for seed in range(3)]
    mixed = (await asyncio.gather(*free, *bound))[:3]
    assert [output.token_ids for output in mixed] == [output.token_ids for output in alone]


async def test_what_else_limits_an_output_combines(model: Model) -> None:
    digits = pb.Grammar(regex="[0-9]+")
    evens = [ord(digit) for digit in "02468"]
    fields = {"temperature": 1.0, "seed": 5, "grammar": digits, "output_logprobs": True, "top_n": 8}
    output = await model.client.complete([1], allowed_token_ids=[*evens, EOS], min_new_tokens=4, **fields)
    assert re.fullmatch("[02468]{4,}", output.text)
    first = output.logprobs[0]
    assert {one.token_id for one in first.top if one.logprob > -1000} == set(evens)
    output = await model.client.complete(
        [1], stop_strings=["7"], include_stop=True, max_new_tokens=500, **fields
    )
    assert output.finished.stop_string == "7" and re.fullmatch("[0-9]*7", output.text)
    error = await failure(model.client.complete([1], allowed_token_ids=[ord("x")], **fields))
    assert error.code() is Code.INVALID_ARGUMENT
    assert (
        "its grammar, sampling.allowed_token_ids and stopping.min_new_tokens leave no token"
        in error.details()
    )


HOSTILE = {
    "deep schema": (pb.Grammar(json_schema='{"items":' * 10_000 + "{}" + "}" * 10_000), "nested too deeply"),
    "no schema": (pb.Grammar(json_schema="{"), "not JSON"),
    "unknown keyword": (pb.Grammar(json_schema='{"not":{}}'), 'Unimplemented keys: ["not"]'),
    "bad regex": (pb.Grammar(regex="(a"), "unclosed group"),
    "deep regex": (pb.Grammar(regex="(" * 10_000 + "a" + ")" * 10_000), "nest"),
    "long choice": (pb.Grammar(choice=pb.Choices(choices=["a"] * 10_001)), "at most 10000 texts"),
    "deep EBNF": (pb.Grammar(ebnf="root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000), "nested too deeply"),
    "no root": (pb.Grammar(ebnf='a ::= "b"'), "there must be a rule root"),
    "bad tag": (pb.Grammar(structural_tag='{"format": {"type": "x"}}'), "format.type = 'x'"),
    "long": (pb.Grammar(regex="a" * 300_000), "at most 262144 bytes"),
    "empty": (pb.Grammar(), "must be choice or ebnf"),
    "false": (pb.Grammar(json_object=False), "must be true"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_grammars_are_refused_by_name(model: Model, name: str) -> None:
    grammar, reason = HOSTILE[name]
    error = await failure(model.client.complete([1], grammar=grammar))
    assert error.code() is Code.INVALID_ARGUMENT
    assert error.details().startswith("grammar") and reason in error.details() and "\n" not in error.details()


async def test_explosive_regexes_end_with_a_clear_status(model: Model) -> None:
    """They compile, and then are bounded mask by mask. The server serves on."""
    for regex in ("((a|aa|b)?(c|cc){1,900}){1,900}", "(x+x+)+y", "(a|b)*a(a|b){24}x"):
        call = model.client.complete([1], grammar=pb.Grammar(regex=regex), max_new_tokens=64, temperature=1.0)
        try:
            output = await call
        except Exception as error:
            assert error.code() is Code.INVALID_ARGUMENT
            assert "the grammar cannot be followed" in error.details()
        else:
            assert output.finished.reason in (pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_EOS)
    assert await model.text(0, grammar=pb.Grammar(regex="ok")) == "ok"
