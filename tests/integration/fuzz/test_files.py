"""Hostile files and grammars: each is refused with an error that says why, or can be used."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ep_server.config import Config, ModelConfig
from ep_server.errors import CheckpointError, ConfigError, ContextLengthExceeded, InvalidArgument
from ep_server.frontend.served_model import ServedModel
from ep_server.models.checkpoint import Checkpoint
from ep_server.records import Grammar, GrammarKind
from ep_server.text.chat_template import ChatTemplate
from ep_server.text.grammars.compiler import CompileLimits, GrammarCompiler
from ep_server.text.tokenizer import Tokenizer
from tests.support.fuzz.calls import TEMPLATE
from tests.support.fuzz.messages import edited
from tests.support.fuzz.trees import json_files
from tests.support.models.released_configs import DEEPSEEK_V3, QWEN3_30B
from tests.support.tokenizers import EOS, byte_fallback, byte_level, loaded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


@given(data=st.sampled_from((QWEN3_30B, DEEPSEEK_V3)).flatmap(json_files))
def test_any_config_json(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(data)
    (folder / "generation_config.json").unlink(missing_ok=True)
    _served(folder)


@given(data=json_files({"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": [1, 2]}))
def test_any_generation_config(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_text(json.dumps(QWEN3_30B))
    (folder / "generation_config.json").write_bytes(data)
    _served(folder)


def _served(folder: Path) -> None:
    try:
        model = ServedModel.load(ModelConfig(path=str(folder)))
    except (CheckpointError, ConfigError) as error:
        assert str(error)
    else:
        assert model.vocab_size > 0 and model.max_context > 0


TOKENIZERS = [json.loads(made().to_str()) for made in (byte_level, byte_fallback)]


@given(data=st.sampled_from(TOKENIZERS).flatmap(json_files))
def test_any_tokenizer_json(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "tokenizer.json").write_bytes(data)
    try:
        tokenizer = Tokenizer.load(folder)
        assert tokenizer is not None
        ids = tokenizer.encode("Hello, wörld \x00")
        tokenizer.decode([*ids, 0, 5, 10**6])
    except (CheckpointError, InvalidArgument) as error:
        assert str(error)


@given(source=edited(TEMPLATE.encode()))
@example(source=b"{% for i in range(99999999) %}{% endfor %}")
@example(source=b"{{ ''.__class__.__mro__ }}")
@example(source=b"{{ " + b"(" * 10_000)
def test_any_chat_template(folder: Path, source: bytes) -> None:
    (folder / "chat_template.jinja").write_bytes(source)
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "tool_calls": [{"name": "f"}]}]
    try:
        template = ChatTemplate.load(folder)
        if template is not None:
            template.render(messages, tools=[{"name": "f"}], max_bytes=1000, seconds=0.5)
    except (CheckpointError, InvalidArgument, ContextLengthExceeded) as error:
        assert str(error)


HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
    "b": {"dtype": "F32", "shape": [4], "data_offsets": [12, 28]},
}

LENGTHS = (None, 0, 1, 7, 2**32, 2**63, 2**64 - 1)


@given(header=json_files(HEADER), length=st.sampled_from(LENGTHS), cut=st.booleans())
@example(header=json.dumps(HEADER).encode(), length=None, cut=False)
def test_any_safetensors_header(folder: Path, header: bytes, length: int | None, cut: bool) -> None:
    data = struct.pack("<Q", len(header) if length is None else length) + header + bytes(28)
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2] if cut else data)
    try:
        checkpoint = Checkpoint.open(folder)
    except CheckpointError as error:
        assert str(error)
    else:
        assert all(tensor.size >= 0 for tensor in checkpoint.tensors.values())


TOML = """\
[grpc]
port = 50051
host = "127.0.0.1"
drain_seconds = 30.0
[scheduler]
max_running = 16
prefix_cache = true
[model]
path = "x"
"""


@given(data=edited(TOML.encode()))
@example(data=b"a = " + b"[" * 100_000)
@example(data=b"[grpc]\nport = " + b"9" * 5000)
@example(data=b"grpc = 3")
@example(data=b"[grpc]\nport = 1e400")
@example(data=b"[grpc.port]\na = 1")
def test_any_toml(folder: Path, data: bytes) -> None:
    file = folder / "server.toml"
    file.write_bytes(data)
    try:
        Config.load(str(file), environ={})
    except ConfigError as error:
        assert str(error)


class Grammars:
    """The process that checks grammars."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        limits = CompileLimits(seconds=2.0)
        self._compiler = GrammarCompiler(loaded(byte_level()), EOS + 1, [EOS], limits)

    def check(self, grammar: Grammar) -> Grammar:
        return self._runner.run(self._compiler.check(grammar))

    def close(self) -> None:
        self._runner.run(self._compiler.close())


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    with asyncio.Runner() as runner:
        found = Grammars(runner)
        yield found
        found.close()


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "pattern": "^a+$"},
        "b": {"anyOf": [{"minimum": 1}]},
    },
    "required": ["a"],
    "$defs": {"c": {"$ref": "#/$defs/c"}},
}
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"},
}
TEXTS: dict[GrammarKind, st.SearchStrategy[bytes]] = {
    GrammarKind.JSON_SCHEMA: json_files(SCHEMA),
    GrammarKind.STRUCTURAL_TAG: json_files(TAG),
    GrammarKind.CHOICE: json_files(["a", "b", "ab"]),
    GrammarKind.REGEX: edited(rb"(a|b)*[^c-z]{2,3}\d+(?:x+)?"),
    GrammarKind.EBNF: edited(b'root ::= "a" (b | [0-9]{1,3})*\nb ::= "b" root?'),
}


@given(made=st.sampled_from(list(TEXTS)).flatmap(lambda kind: st.tuples(st.just(kind), TEXTS[kind])))
@example(made=(GrammarKind.JSON_SCHEMA, b'{"not":' * 10_000 + b"1" + b"}" * 10_000))
@example(made=(GrammarKind.REGEX, b"((a{1,999}){1,999}){1,999}"))
def test_any_grammar(grammars: Grammars, made: tuple[GrammarKind, bytes]) -> None:
    kind, data = made
    try:
        checked: Any = grammars.check(Grammar(kind, data.decode(errors="replace")))
    except InvalidArgument as error:
        assert error.field.startswith("grammar.")
    else:
        assert checked.kind is GrammarKind.PROGRAM
