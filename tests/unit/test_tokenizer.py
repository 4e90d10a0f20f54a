"""Incremental detokenisation against the decoder itself, over whole outputs, however the bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep_server.errors import CheckpointError
from ep_server.tokenizer import MAX_PENDING, REPLACEMENT, Detokenizer, Tokenizer
from tests.harness import tokenizers as made

BYTES = made.loaded(made.byte_level())
FALLBACK = made.loaded(made.byte_fallback())


def pieces(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*map(detokenizer.push, output), detokenizer.flush()]


@given(st.text(max_size=40), st.text(max_size=10))
def test_pieces_add_up_to_the_text(text: str, prompt: str) -> None:
    for tokenizer in (BYTES, FALLBACK):
        output = list(text.encode())
        assert "".join(pieces(tokenizer, list(prompt.encode()), output)) == text.rstrip(REPLACEMENT)


@given(st.text(alphabet="aé€😀", min_size=1, max_size=12))
def test_a_character_comes_out_with_its_last_byte(text: str) -> None:
    for tokenizer in (BYTES, FALLBACK):
        detokenizer = Detokenizer(tokenizer, list(b"prompt"))
        for character in text:
            *first, last = character.encode()
            assert [detokenizer.push(byte) for byte in first] == [""] * len(first)
            assert detokenizer.push(last) == character


@given(st.lists(st.integers(0, 256), max_size=60))
def test_any_bytes_at_all_give_what_the_decoder_gives(output: list[int]) -> None:
    whole = BYTES.decode([*b"ab", *output])[2:]
    assert "".join(pieces(BYTES, list(b"ab"), output)).rstrip(REPLACEMENT) == whole.rstrip(REPLACEMENT)


def test_a_wait_for_more_bytes_is_bounded() -> None:
    detokenizer = Detokenizer(BYTES, list(b"x"))
    given = [detokenizer.push(0x80) for _ in range(4 * MAX_PENDING)]
    assert "".join(given).count(REPLACEMENT) >= 3 * MAX_PENDING
    assert detokenizer.push(ord("a")).endswith("a")


def test_an_emoji_after_invalid_bytes_is_whole() -> None:
    for noise in range(3 * MAX_PENDING):
        text = "".join(pieces(BYTES, [1], [0x80] * noise + list("😀".encode()) + [0x80] * noise))
        assert text.count("😀") == 1, noise


def test_an_unfinished_character_at_the_end_is_left_out() -> None:
    assert "".join(pieces(BYTES, [1], [*b"ok", 0xF0, 0x9F])) == "ok"


def test_a_character_that_the_prompt_began_is_given_whole() -> None:
    first, *rest = "😀".encode()
    assert "".join(pieces(BYTES, [*b"a", first], [*rest, *b"!"])) == "😀!"


def test_special_tokens_have_no_text_and_leave_no_trace() -> None:
    output = [ord("a"), *[made.EOS] * 200, *"é".encode(), made.EOS]
    assert "".join(pieces(BYTES, [1], output)) == "aé"


def test_a_word_keeps_its_leading_space_after_a_prompt() -> None:
    assert FALLBACK.decode([258, 259]) == "world!"
    assert pieces(FALLBACK, [made.SPACE_HELLO], [258, 259]) == [" world", "!", ""]


def test_encode_is_the_inverse_of_decode() -> None:
    assert BYTES.decode(BYTES.encode("grüße 😀")) == "grüße 😀"


def test_load(tmp_path) -> None:
    assert Tokenizer.load(tmp_path) is None
    made.save(made.byte_level(), tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded is not None and loaded.encode("az") == [97, 122]
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.load(tmp_path)
