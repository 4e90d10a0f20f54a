"""Converts text to token ids and back, one token at a time, with a checkpoint's tokenizer.json.

Returned text is final: a character whose bytes span several tokens is returned with the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import tokenizers

from ep_server.errors import CheckpointError, InvalidArgument
from ep_server.models.families import is_there, read_file

REPLACEMENT = "\ufffd"  # what decoders give for bytes that are not (yet) UTF-8
PROMPT_CONTEXT = 6  # prompt tokens decoded along with the output, so that its leading space is right
MAX_PENDING = 8  # no character needs more tokens than this: longer waits are invalid bytes
SHOWN = 80  # characters of a value that an error message repeats
TAIL = 3  # an unfinished UTF-8 character has at most 3 bytes, so at most 3 tokens


class Tokenizer:
    """A checkpoint's tokenizer. Calls are independent of each other; encode releases the GIL."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        added = inner.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)

    @staticmethod
    def load(directory: Path) -> Tokenizer | None:
        """Reads tokenizer.json; None where the checkpoint has none.

        Raises: CheckpointError if the file is there and broken.
        """
        file = directory / "tokenizer.json"
        if not is_there(file):
            return None
        content = read_file(file)
        try:
            inner = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file}: not a tokenizer ({error})") from error
        inner.no_padding()
        inner.no_truncation()
        return Tokenizer(inner)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a prompt. special: add the tokenizer's own, such as the begin of a sequence.

        Raises: InvalidArgument for text that the library fails at.
        """
        try:
            ids: list[int] = self._inner.encode(text, add_special_tokens=special).ids
        except BaseException as error:  # a panic of the library is not an Exception: the call would never end
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            allowed = f"text that the tokenizer can encode ({error})"
            raise InvalidArgument("text", text[:SHOWN], allowed) from error
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; U+FFFD where bytes are no UTF-8."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=True)
        return text

    @property
    def inner(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, not to be changed."""
        return self._inner

    def to_json(self) -> str:
        """tokenizer.json of this tokenizer."""
        text: str = self._inner.to_str()
        return text

    def skips(self, token_id: int) -> bool:
        """decode() leaves the token out: it is special or unknown. Others may have no text, yet change their
        neighbours' text.
        """
        return token_id in self._special or self._inner.id_to_token(token_id) is None


class Detokenizer:
    """Turns the growing output of one request into text, in pieces that are final.

    Together they are decode(prompt + output) beyond decode(prompt), with three exceptions. A character that
    the prompt begins and the output finishes is given whole. U+FFFD at the end is left out: it may be half a
    character. What was given stays: byte fallback makes U+FFFD of a whole run of byte tokens, ASCII included,
    once one of them is invalid.

    Decodes a window of a few tokens per step, so a step costs the same however long the output is.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        backwards = (token_id for token_id in reversed(prompt_ids) if not tokenizer.skips(token_id))
        tail = list(islice(backwards, PROMPT_CONTEXT))[::-1]
        start, end = self._clean_part(tail)
        self._window = tail[start:]  # never holds a token that decode() skips
        self._read = end - start  # tokens of the window whose text was given out
        self._known_text = self._known()
        # What the prompt's tokens after the clean part decode to: U+FFFD, real or of an unfinished character.
        self._prompt_end = tokenizer.decode(self._window)[len(self._known_text) :]

    def push(self, token_id: int) -> str:
        """Adds a token and returns the text that became final, often empty."""
        if self._tokenizer.skips(token_id):
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._give(text, len(self._window))
        if len(self._window) - self._read > MAX_PENDING:
            end = len(self._window) - TAIL
            return self._give(self._tokenizer.decode(self._window[:end]), end)
        return ""

    def flush(self) -> str:
        """The rest at the end of the output; an unfinished character is left out."""
        text = self._tokenizer.decode(self._window).rstrip(REPLACEMENT)
        return self._give(text, len(self._window))

    def _clean_part(self, tail: list[int]) -> tuple[int, int]:
        """The part of the prompt's tail that is whole characters; cut ones spoil their neighbours.

        The tokens after it may begin a character that the output finishes.
        """
        for end in range(len(tail), max(0, len(tail) - TAIL - 1), -1):
            for start in range(min(TAIL + 1, end)):
                text = self._tokenizer.decode(tail[start:end])
                if not text.startswith(REPLACEMENT) and not text.endswith(REPLACEMENT):
                    return start, end
        return 0, 0

    def _give(self, text: str, end: int) -> str:
        """Text beyond what is known; the window then begins where the last one was read to."""
        new = text[len(self._known_text) :]
        new = new[_shared(new, self._prompt_end) :]
        if not new and end - self._read <= TAIL:
            return ""  # stays, for the next token's text: a space, say, that the decoder strips at the start
        self._window = self._window[self._read :]
        self._read = end - self._read
        self._known_text = self._known()
        self._prompt_end = ""
        return new

    def _known(self) -> str:
        return self._tokenizer.decode(self._window[: self._read])


def _shared(first: str, second: str) -> int:
    """Characters at the start of both."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
