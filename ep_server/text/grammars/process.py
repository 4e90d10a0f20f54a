"""The process that checks grammars: one JSON object per line in, one out. compiler.py starts it.

Timers end it at the limit of a grammar, also inside the library and after its parent's death.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import llguidance
import tokenizers

from ep_server.records import Grammar, GrammarKind
from ep_server.text.grammars.masks import LIMITS, one_line
from ep_server.text.grammars.notation import program_of
from ep_server.text.grammars.vocabulary import library_tokenizer, special_tokens


class Checker:
    """Compiles grammars for one vocabulary."""

    def __init__(self, start: dict[str, Any]) -> None:
        inner = tokenizers.Tokenizer.from_str(start["tokenizer"])
        self._library = library_tokenizer(inner, start["vocab"], start["eos"])
        self._special = special_tokens(inner, start["vocab"])
        # Compiled once, so that no grammar's limit covers what all share.
        self.answer({"kind": GrammarKind.JSON_OBJECT, "source": ""})

    def answer(self, asked: dict[str, str]) -> dict[str, str]:
        """The program of a grammar, or why it has none."""
        try:
            program = program_of(Grammar(GrammarKind(asked["kind"]), asked["source"]), self._special)
            matcher = llguidance.LLMatcher(self._library, program, log_level=0, limits=LIMITS)
            if not matcher.is_error():
                matcher.compute_bitmask()
            error = one_line(matcher.get_error()) if matcher.is_error() else ""
        except ValueError as failed:
            error = one_line(str(failed))
        except BaseException as failed:  # a panic of the library is no Exception
            if isinstance(failed, KeyboardInterrupt | SystemExit):
                raise
            error = one_line(f"{type(failed).__name__} {failed}")
        return {"error": error} if error else {"program": program}


def main() -> None:
    """Answers until its input ends."""
    lines = iter(sys.stdin.buffer)
    start = json.loads(next(lines))
    checker = Checker(start)
    limit = _size() + start["memory"]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _say({})
    for line in lines:
        asked = json.loads(line)
        # The signals of both end the process: of the time that it computes, and on a busy machine of time.
        signal.setitimer(signal.ITIMER_PROF, start["seconds"])
        signal.setitimer(signal.ITIMER_REAL, start["deadline"])
        answer = checker.answer(asked)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say(answer)


def _say(answer: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _size() -> int:
    """Of this process's address space, bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
