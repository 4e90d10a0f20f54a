"""Pieces of Lark, as llguidance reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import llguidance

# Between the parts of a JSON text. A model that draws at random would else fill the output with it.
WHITESPACE = r"[ \n\r\t]{1,40}"
ANY_TEXT = r"/(.|\n)*/"


def json_rule(schema: Any) -> str:
    """JSON that is valid under a schema."""
    fields = schema if isinstance(schema, dict) else {} if schema else {"enum": []}
    return "%json " + json.dumps({**fields, "x-guidance": {"whitespace_pattern": WHITESPACE}})


def quoted(text: str) -> str:
    """Exactly this text, which is not empty."""
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str) -> str:
    """Text that a regular expression matches as a whole."""
    return f"/{llguidance.regex_to_lark(unanchored(pattern), '')}/"


def unanchored(pattern: str) -> str:
    """Without ^ and $ around it: the whole text must match in any case."""
    pattern = pattern.removeprefix("^")
    body = pattern.removesuffix("$")
    escaped = (len(body) - len(body.rstrip("\\"))) % 2 == 1
    return pattern if escaped else body


def literal(text: str, special: Mapping[str, int]) -> str:
    """Exactly this text, in which special tokens stand for themselves; empty for no text."""
    parts = list[str]()
    while text:
        found = [(at, -len(name), name) for name in special if name and (at := text.find(name)) >= 0]
        at, _, name = min(found, default=(len(text), 0, ""))
        if at:
            parts.append(quoted(text[:at]))
        if name:
            parts.append(f"<[{special[name]}]>")
        text = text[at + len(name) :]
    return " ".join(parts)
