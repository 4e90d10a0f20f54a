"""Sources become programs that the library compiles, or are refused with a reason; nothing else happens."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep_server.records import Grammar, GrammarKind
from ep_server.text.grammars.notation import program_of
from ep_server.text.grammars.vocabulary import library_tokenizer
from tests.support.tokenizers import EOS, byte_level

TAG = {"type": "tag", "begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {}}, "end": "</f>"}
WORDS = (
    "type",
    "format",
    "triggered_tags",
    "triggers",
    "tags",
    "tag",
    "begin",
    "end",
    "content",
    "<f=",
    "or",
)
WORDS += (
    "structures",
    "schema",
    "json_schema",
    "any_text",
    "sequence",
    "elements",
    "star",
    "regex",
    "pattern",
)
VALUES = st.recursive(
    st.sampled_from((*WORDS, "", 1, None, True)) | st.just(TAG),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=5),
    max_leaves=12,
)
GBNF = st.lists(
    st.sampled_from(
        ['"a"', "[a-z]", '[^"]', "(", ")", "|", "*", "+", "{1,3}", "\n", "::=", "root", "x", '"', "\\"]
    ),
    max_size=20,
)


@pytest.fixture(scope="module")
def library() -> llguidance.LLTokenizer:
    return library_tokenizer(byte_level(), EOS + 1, [EOS])


def program(kind: GrammarKind, source: str) -> str | None:
    try:
        return program_of(Grammar(kind, source), {"<f=": 7})
    except ValueError as error:
        assert str(error)
        return None


@given(value=VALUES)
def test_any_json_is_a_structural_tag_or_refused(library: Any, value: object) -> None:
    for source in (
        value,
        {"type": "structural_tag", "format": value},
        {"structures": value, "triggers": ["<f="]},
    ):
        found = program(GrammarKind.STRUCTURAL_TAG, json.dumps(source))
        if found is not None:
            llguidance.LLMatcher(library, found, log_level=0).get_error()


@given(parts=GBNF)
def test_any_text_is_a_gbnf_grammar_or_refused(library: Any, parts: list[str]) -> None:
    found = program(GrammarKind.EBNF, "root ::= " + " ".join(parts))
    if found is not None:
        llguidance.LLMatcher(library, found, log_level=0).get_error()


def test_special_tokens_are_matched_as_tokens() -> None:
    tag = json.dumps({"format": {**TAG, "content": {"type": "const_string", "value": "x<eot>y"}}})
    found = program_of(Grammar(GrammarKind.STRUCTURAL_TAG, tag), {"<eot>": 5, "<f=": 7})
    assert '"x" <[5]> "y"' in found and '<[7]> "a>"' in found


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"type": "dispatch"}, "format.type = 'dispatch': must be one of const_string"),
        ({"begin": 1}, "begin = 1: must be a text"),
        ({"end": []}, "end: must be a text or a list of texts"),
        ({"content": {"type": "any_text", "excludes": ["x"]}}, "excludes: must be absent"),
        (
            {"content": {"type": "triggered_tags", "triggers": ["<g"], "tags": [TAG]}},
            "must start with one of",
        ),
    ],
)
def test_what_a_tag_cannot_say_is_named(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        program_of(Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps({"format": {**TAG, **changed}})), {})
