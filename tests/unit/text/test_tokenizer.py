"""Incremental detokenisation against the decoder itself, over whole outputs, however the bytes are cut."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import models

from ep_server.errors import CheckpointError, InvalidArgument
from ep_server.text.tokenizer import MAX_PENDING, REPLACEMENT, Detokenizer, Tokenizer
from tests.support import tokenizers as made

BYTES = made.loaded(made.byte_level())
FALLBACK = made.loaded(made.byte_fallback())


def pieces(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*map(detokenizer.push, output), detokenizer.flush()]


def oracle(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> str:
    """What `output` adds to the text of `prompt`.

    That is what follows the prompt's own text. A character that the output finishes was U+FFFD in there.
    """
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *output])
    while not whole.startswith(before):
        before = before[:-1]
    return whole[len(before) :]


def check(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> None:
    """U+FFFD at the end may be half a character, so it need not be given."""
    text = "".join(pieces(tokenizer, prompt, output))
    assert text.rstrip(REPLACEMENT) == oracle(tokenizer, prompt, output).rstrip(REPLACEMENT)


@given(st.text(max_size=40), st.text(max_size=10))
@example(" ", "")
@example("  Helloworld", "")
@example(REPLACEMENT * 3, "")
@example("AA", f"hello{REPLACEMENT}")
@example(f"{REPLACEMENT}AA", REPLACEMENT * 4)
def test_pieces_add_up_to_the_text(text: str, prompt: str) -> None:
    for tokenizer in (BYTES, FALLBACK):
        check(tokenizer, list(prompt.encode()), list(text.encode()))


tokens = st.integers(0, made.UNKNOWN)


@given(st.lists(tokens, max_size=20), st.lists(tokens, max_size=60))
@example(list("😀".encode())[:3], list(b"AA"))
@example([0x80] * 5 + [0xF0], [0x9F, 0x98, 0xF0, ord("a")])
def test_any_tokens_give_what_the_decoder_gives(prompt: list[int], output: list[int]) -> None:
    check(BYTES, prompt, output)


@given(
    st.lists(st.sampled_from(made.PIECES), max_size=9), st.lists(st.sampled_from(made.PIECES), max_size=30)
)
@example([made.BOS], [made.SPACE, made.SPACE, made.SPACE_HELLO])
def test_any_words_give_what_the_decoder_gives(prompt: list[int], output: list[int]) -> None:
    check(FALLBACK, prompt, output)


@given(st.text(alphabet="aé€😀", min_size=1, max_size=12))
def test_a_character_comes_out_with_its_last_byte(text: str) -> None:
    for tokenizer in (BYTES, FALLBACK):
        detokenizer = Detokenizer(tokenizer, list(b"prompt"))
        for character in text:
            *first, last = character.encode()
            assert [detokenizer.push(byte) for byte in first] == [""] * len(first)
            assert detokenizer.push(last) == character


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


@pytest.mark.parametrize("end", [list(REPLACEMENT.encode()), [0xF0], [0xF0, 0x9F, 0x98]])
def test_the_end_of_a_prompt_is_not_given_again(end: list[int]) -> None:
    prompt = [*b"hello", *end]
    assert "".join(pieces(BYTES, prompt, [*b"AA"])) == "AA"
    assert "".join(pieces(FALLBACK, prompt, [made.HELLO, made.SPACE_HELLO])) == "Hello Hello"


@pytest.mark.parametrize("prompt", [[], [made.BOS], [made.BOS] * 9, [made.SPACE], [made.SPACE_HELLO]])
def test_leading_spaces_are_kept(prompt: list[int]) -> None:
    output = [made.SPACE, made.BOS, made.SPACE, made.SPACE_HELLO, made.WORLD]
    expected = FALLBACK.decode([*prompt, *output])[len(FALLBACK.decode(prompt)) :]
    assert expected.endswith("  Hello world") and "".join(pieces(FALLBACK, prompt, output)) == expected


def test_special_tokens_have_no_text_and_leave_no_trace() -> None:
    output = [ord("a"), *[made.EOS] * 200, *"é".encode(), made.EOS]
    assert "".join(pieces(BYTES, [1], output)) == "aé"


def test_a_word_keeps_its_leading_space_after_a_prompt() -> None:
    assert FALLBACK.decode([made.WORLD, made.MARK]) == "world!"
    assert pieces(FALLBACK, [made.SPACE_HELLO], [made.WORLD, made.MARK]) == [" world", "!", ""]


def test_tokens_without_text_do_not_pile_up() -> None:
    detokenizer = Detokenizer(BYTES, [ord("a")])
    for _ in range(1000):
        assert detokenizer.push(made.UNKNOWN) == ""
    assert detokenizer.push(ord("b")) == "b"


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


@pytest.mark.parametrize(
    ("inner", "text", "reason"),
    [
        (made.panicking(), made.PANICS, "bad split"),
        (tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>")), "b", "Missing .UNK. token"),
    ],
    ids=["panic", "no unknown token"],
)
def test_text_that_the_library_fails_at(inner: tokenizers.Tokenizer, text: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=f"text = .*: must be text .* can encode .*{reason}"):
        made.loaded(inner).encode(text)
