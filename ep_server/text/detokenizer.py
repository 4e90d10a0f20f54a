"""Text of one output: detokenizes, finds stop strings, and returns only final text.

The result does not depend on how the text is cut into tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from ep_server.text.tokenizer import Detokenizer


class StopStrings:
    """Finds the stop string that ends first; holds back text that may be the beginning of one."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self._passed = 0  # characters of what is held that no stop string may end within

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """Adds text. Returns (final text, the stop string that was found or None).

        may_end: a stop string may end in `text`; it may always begin there.
        """
        self._held += text
        if not may_end:
            self._passed = len(self._held)
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            return self._held[: end if self._include else start], stop
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(certain) :]
        self._passed = max(0, self._passed - len(certain))
        return certain, None

    def flush(self) -> str:
        """What was held back, at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _find(self, stop: str) -> int:
        return self._held.find(stop, max(0, self._passed - len(stop) + 1))


class OutputText:
    """Tokens in, final text out. One per request that wants text or has stop strings."""

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], *, include_stop: bool, min_tokens: int
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, include_stop)
        self._include_stop = include_stop
        self._minimum_left = min_tokens  # tokens within which no stop string ends

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Adds a token that does not end the output. Returns (final text, stop string found or None)."""
        text = self._detokenizer.push(token_id)
        may_end = self._minimum_left <= 0
        self._minimum_left -= 1
        return self._stops.push(text, may_end=may_end) if text else ("", None)

    def finish(self, token_id: int, *, is_stop: bool) -> tuple[str, str | None]:
        """Adds the last token. is_stop: it is a stop or EOS token, whose text shows only with include_stop.

        Returns: (all remaining text, the stop string if this very token completed one).
        """
        if is_stop and not self._include_stop:
            return self._rest("")
        text, found = self.push(token_id)
        return (text, found) if found is not None else self._rest(text)

    def _rest(self, text: str) -> tuple[str, str | None]:
        tail, found = self._stops.push(self._detokenizer.flush(), may_end=self._minimum_left < 0)
        return text + tail + ("" if found is not None else self._stops.flush()), found


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, `stop` itself excepted."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
