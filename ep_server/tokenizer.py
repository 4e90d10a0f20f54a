"""Text to token ids and back, one token at a time. Knows one tokenizer.json; nothing of requests or gRPC.

Text given out is final: a character whose bytes are spread over several tokens waits for its last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from ep_server.errors import CheckpointError

REPLACEMENT = "\ufffd"  # what decoders give for bytes that are not (yet) UTF-8
PROMPT_CONTEXT = 6  # prompt tokens decoded along with the output, so that its leading space is right
MAX_PENDING = 8  # no character needs more tokens than this: longer waits are invalid bytes
TAIL = 3  # an unfinished UTF-8 character has at most 3 bytes, so at most 3 tokens


class Tokenizer:
    """A checkpoint's tokenizer. Calls are independent of each other; encode releases the GIL."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner

    @staticmethod
    def load(directory: Path) -> Tokenizer | None:
        """Reads tokenizer.json; None where the checkpoint has none.

        Raises: CheckpointError if the file is there and broken.
        """
        file = directory / "tokenizer.json"
        if not file.is_file():
            return None
        try:
            inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file}: not a tokenizer ({error})") from error
        inner.no_padding()
        inner.no_truncation()
        return Tokenizer(inner)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, the tokenizer's own special tokens included."""
        ids: list[int] = self._inner.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; U+FFFD where bytes are no UTF-8."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=True)
        return text


class Detokenizer:
    """Turns the growing output of one request into text: decode(all) in pieces, less a half end.

    Decodes a window of a few tokens per step, so a step costs the same however long the output is.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        tail = list(prompt_ids[-PROMPT_CONTEXT:])
        start, end = self._clean_part(tail)
        self._window = tail[start:]
        self._read = end - start  # tokens of the window whose text was given out
        self._known_text = self._known()

    def push(self, token_id: int) -> str:
        """Adds a token and returns the text that became certain, often empty."""
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
        """The part of the prompt's tail that is whole characters; cut ones spoil what is beside them.

        The tokens after it begin a character that the output finishes and gives as a whole.
        """
        for end in range(len(tail), max(0, len(tail) - TAIL - 1), -1):
            for start in range(min(TAIL + 1, end)):
                text = self._tokenizer.decode(tail[start:end])
                if not text.startswith(REPLACEMENT) and not text.endswith(REPLACEMENT):
                    return start, end
        return len(tail), len(tail)

    def _give(self, text: str, end: int) -> str:
        """Text beyond what is known; the window then begins where the last one was read to."""
        new = text[len(self._known_text) :]
        if not new:
            del self._window[self._read : end]  # special tokens leave no trace
            return ""
        self._window = self._window[self._read :]
        self._read = end - self._read
        self._known_text = self._known()
        return new

    def _known(self) -> str:
        return self._tokenizer.decode(self._window[: self._read])
