"""A mask allows exactly the tokens that some text of the grammar goes on with."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import tokenizers

from ep_server.records import Grammar, GrammarKind, Request, Sampling, Stopping
from ep_server.text.grammars.masks import GrammarMasks
from ep_server.text.grammars.notation import program_of
from tests.support import tokenizers as made
from tests.support.structured import DEMO

SECONDS = 30.0
CHOICES = ("a", "ab", "abc", "bö", "😀!", " c")
DIGITS = ("12", "1", "304", "999")


def vocabularies() -> dict[str, tuple[tokenizers.Tokenizer, int, int, dict[int, str], Sequence[str]]]:
    """Tokenizer, size, end of sequence, text of tokens that are not one byte, choices."""
    words = {
        made.SPACE_HELLO: " Hello",
        made.WORLD: " world",
        made.MARK: "!",
        made.SPACE: " ",
        made.HELLO: "Hello",
    }
    demo = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    return {
        "bytes": (made.byte_level(), 300, made.EOS, {}, CHOICES),
        "fallback": (made.byte_fallback(), 264, 256, words, (*CHOICES, "Hello world!", "Hello  world")),
        "words": (demo, 16, 14, dict(enumerate("0123456789+-= ")), DIGITS),
    }


VOCABULARIES = vocabularies()


def asked(grammar: Grammar, number: int = 1, **fields: object) -> Request:
    program = Grammar(GrammarKind.PROGRAM, program_of(grammar, {}))
    sampling = Sampling(allowed_token_ids=fields.pop("allowed", ()))
    stopping = Stopping(99, **fields)
    return Request("r", number, (1,), sampling, stopping, grammar=program)


def tokens_of(masks: GrammarMasks, number: int = 1) -> set[int]:
    masks.wait([number], SECONDS)
    assert masks.ready(number) and not masks.failures()
    mask = masks.mask(number)
    assert mask is not None
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@pytest.fixture
def masks() -> Iterator[GrammarMasks]:
    with_bytes = GrammarMasks(made.byte_level(), made.EOS + 1, {made.EOS}, threads=2)
    yield with_bytes
    with_bytes.close()


@pytest.mark.parametrize("name", VOCABULARIES)
def test_masks_of_choices_are_their_prefixes(name: str) -> None:
    inner, size, eos, words, choices = VOCABULARIES[name]
    text_of = {token: bytes([token]) for token in range(256) if name != "words"}
    text_of |= {token: word.encode() for token, word in words.items()}
    texts = [choice.encode() for choice in choices]
    masks = GrammarMasks(inner, size, {eos})
    draws = random.Random(0)
    for number in range(1, 13):
        masks.add(asked(Grammar(GrammarKind.CHOICE, json.dumps(choices)), number))
        written = b""
        while True:
            expected = {t for t, text in text_of.items() if any(c.startswith(written + text) for c in texts)}
            expected |= {eos} if written in texts else set()
            found = tokens_of(masks, number)
            # Where the grammar leaves one text only, the library takes the tokenizer's own way to write it.
            assert found == expected or (found < expected and len(found) == 1)
            token = draws.choice(sorted(found))
            if token == eos:
                break
            masks.accept({number: token})
            written += text_of[token]
        masks.remove(number)
    masks.close()


def test_a_mask_depends_on_the_output_alone(masks: GrammarMasks) -> None:
    """One that is rebuilt from its tokens, and 70 that advance together."""
    grammar = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object", "required": ["key"]}')
    output = list(b'{"key": [1, {"a": "\xc3')
    for number in range(1, 71):
        masks.add(asked(grammar, number))
    for token in output:
        masks.accept(dict.fromkeys(range(1, 71), token))
    masks.add(asked(grammar, 99), output)
    expected = tokens_of(masks, 99)
    assert expected == set(range(0x80, 0xC0))
    assert all(tokens_of(masks, number) == expected for number in range(1, 71))


def test_what_else_a_request_allows(masks: GrammarMasks) -> None:
    digits = Grammar(GrammarKind.REGEX, "[0-9]{1,3}")
    three = asked(digits, allowed=(*b"12", made.EOS), min_new_tokens=2, eos_token_ids=frozenset({made.EOS}))
    masks.add(three)
    for expected in (set(b"12"), set(b"12"), {*b"12", made.EOS}, {made.EOS}):
        assert tokens_of(masks) == expected
        masks.accept({1: ord("1")})
    masks.add(asked(digits, 2, allowed=tuple(b"x")))
    masks.add(asked(digits, 3, min_new_tokens=9, eos_token_ids=frozenset({made.EOS})))
    for _ in range(3):
        masks.accept({3: ord("1")})
        masks.wait([2, 3], SECONDS)
    assert set(masks.failures()) == {1, 2, 3}
    assert masks.failures()[2].endswith("leave no token") and masks.failures()[3].endswith("leave no token")
    assert masks.mask(2) is None
    masks.remove(2)
    assert 2 not in masks.failures() and 2 not in masks and masks.ready(2)


def test_a_program_that_does_not_compile_fails_its_request(masks: GrammarMasks) -> None:
    bad = Request("r", 1, (1,), Sampling(), Stopping(9), grammar=Grammar(GrammarKind.PROGRAM, "start: )"))
    masks.add(bad)
    masks.add(asked(Grammar(GrammarKind.REGEX, "ok"), 2))
    masks.wait([1, 2], SECONDS)
    assert list(masks.failures()) == [1] and masks.ready(2)
