"""Stop strings against a search that sees one character at a time."""

from __future__ import annotations

from functools import partial

from hypothesis import example, given
from hypothesis import strategies as st

from ep_server.text.detokenizer import OutputText, StopStrings
from ep_server.text.tokenizer import Detokenizer
from tests.support import tokenizers as made

BYTES = made.loaded(made.byte_level())
stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)


def oracle(text: str, stops: list[str], include: bool, after: int = 0) -> tuple[str, str | None]:
    """The shortest beginning of `text`, longer than `after`, that ends with a stop string; of several the
    longest one.
    """
    for end in range(after + 1, len(text) + 1):
        found = max((s for s in stops if text[:end].endswith(s)), key=len, default=None)
        if found is not None:
            return text[: end if include else end - len(found)], found
    return text, None


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=8), stops, st.booleans())
def test_the_result_does_not_depend_on_the_cuts(pieces: list[str], stops: list[str], include: bool) -> None:
    search = StopStrings(stops, include)
    out, found = "", None
    for piece in pieces:
        text, found = search.push(piece)
        out += text
        if found is not None:
            break
    else:
        out += search.flush()
    assert (out, found) == oracle("".join(pieces), stops, include)


@given(
    st.text(alphabet="abc", max_size=12),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    st.booleans(),
    st.integers(0, 12),
)
@example("abc", ["ab"], False, 1)
def test_a_stop_string_ends_only_after_the_minimum(
    text: str, stops: list[str], include: bool, minimum: int
) -> None:
    search, out, found = output(tuple(stops), include_stop=include, min_tokens=minimum), "", None
    for at, character in enumerate(text):
        push = search.push if at + 1 < len(text) else partial(search.finish, is_stop=False)
        piece, found = push(ord(character))
        out += piece
        if found is not None:
            break
    assert (out, found) == oracle(text, stops, include, after=minimum)


@given(st.text(alphabet="ab", max_size=20), stops)
def test_only_a_possible_beginning_is_held_back(text: str, stops: list[str]) -> None:
    search, out = StopStrings(stops, include=False), ""
    for at, character in enumerate(text):
        piece, found = search.push(character)
        if found is not None:
            return
        out += piece
        held = text[len(out) : at + 1]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def output(stops: tuple[str, ...] = (), *, include_stop: bool = False, min_tokens: int = 0) -> OutputText:
    return OutputText(Detokenizer(BYTES, [1]), stops, include_stop=include_stop, min_tokens=min_tokens)


def test_a_stop_string_of_bytes_cut_anywhere() -> None:
    text = output(("ü😀",))
    given = [text.push(byte) for byte in "aü😀".encode()]
    assert given[0] == ("a", None)
    assert given[1:-1] == [("", None)] * (len(given) - 2)
    assert given[-1] == ("", "ü😀")


def test_a_stop_token_has_no_text_unless_asked_for() -> None:
    text = output()
    assert text.push(ord("a")) == ("a", None)
    assert text.finish(ord("."), is_stop=True) == ("", None)
    assert output(include_stop=True).finish(ord("."), is_stop=True) == (".", None)


def test_the_end_gives_out_what_was_held_back() -> None:
    text = output(("abc",))
    assert text.push(ord("a")) == ("", None)
    assert text.finish(ord("b"), is_stop=False) == ("ab", None)


def test_the_last_token_may_complete_a_stop_string() -> None:
    text = output(("ab",))
    assert text.push(ord("a")) == ("", None)
    assert text.finish(ord("b"), is_stop=False) == ("", "ab")


def test_no_stop_string_ends_within_the_minimum() -> None:
    text = output(("a",), min_tokens=2)
    assert [text.push(ord("a")) for _ in range(3)] == [("a", None), ("a", None), ("", "a")]


def test_a_stop_string_may_begin_before_the_minimum() -> None:
    text = output(("AB",), min_tokens=1)
    assert [text.push(ord(token)) for token in "AB"] == [("", None), ("", "AB")]


def test_a_stop_string_that_spans_the_minimum_is_included() -> None:
    text = output(("AB",), include_stop=True, min_tokens=1)
    assert [text.push(ord(token)) for token in "AB"] == [("", None), ("AB", "AB")]


def test_the_last_token_may_be_within_the_minimum() -> None:
    text = output(("ab",), min_tokens=2)
    assert text.push(ord("a")) == ("", None)
    assert text.finish(ord("b"), is_stop=False) == ("ab", None)
