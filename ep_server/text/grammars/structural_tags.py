"""Structural tags as Lark: free text in which tags open parts that follow a grammar.

Both notations: {"type": "structural_tag", "format": {...}}, and the older one with "structures" and
"triggers". What cannot be expressed is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ep_server.text.grammars.lark import ANY_TEXT, json_rule, literal, quoted, regex

MOST_DEPTH = 32


def program_of(source: str, special: Mapping[str, int]) -> str:
    """The program of a structural tag.

    Args:
        special: id of each special token, by its text.
    Raises: ValueError.
    """
    try:
        given = json.loads(source)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError("a structural tag is a JSON object")
    tag = _older(given) if "structures" in given else given.get("format")
    rules = _Rules(special)
    start = rules.of(tag, "format", 0)
    return "\n".join([f"start: {start}", *rules.lines])


def _older(given: Mapping[str, Any]) -> dict[str, Any]:
    """The older notation as a format."""
    tags = [
        {
            "type": "tag",
            "begin": structure.get("begin"),
            "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
            "end": structure.get("end"),
        }
        for structure in _list(given, "structures", dict)
    ]
    return {"type": "triggered_tags", "triggers": given.get("triggers"), "tags": tags}


class _Rules:
    """The rules of one program. of() returns what stands for a format in a rule."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self.lines: list[str] = []
        self._special = special
        self._kinds: dict[str, Callable[[Mapping[str, Any], int], str]] = {
            "const_string": lambda f, _: self._literal(_text(f, "value")),
            "json_schema": self._json,
            "regex": lambda f, _: self._new(regex(_text(f, "pattern")), terminal=True),
            "any_text": lambda f, _: self._any_text(f),
            "sequence": lambda f, depth: self._new(" ".join(self._all(f, "elements", depth))),
            "or": lambda f, depth: self._new(" | ".join(self._all(f, "elements", depth))),
            "optional": lambda f, depth: f"({self._content(f, depth)})?",
            "star": lambda f, depth: f"({self._content(f, depth)})*",
            "plus": lambda f, depth: f"({self._content(f, depth)})+",
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def of(self, given: Any, name: str, depth: int) -> str:
        """Raises: ValueError naming what is wrong."""
        if depth > MOST_DEPTH:
            raise ValueError(f"nested deeper than {MOST_DEPTH}")
        kind = given.get("type") if isinstance(given, dict) else None
        if not isinstance(kind, str) or kind not in self._kinds:
            raise ValueError(f"{name}.type = {kind!r}: must be one of {', '.join(self._kinds)}")
        return self._kinds[kind](given, depth + 1)

    def _new(self, body: str, *, terminal: bool = False, options: str = "") -> str:
        name = f"{'T' if terminal else 'r'}{len(self.lines)}"
        self.lines.append(f"{name}{options}: {body}")
        return name

    def _literal(self, text: str) -> str:
        return literal(text, self._special)

    def _content(self, given: Mapping[str, Any], depth: int) -> str:
        return self.of(given.get("content"), "content", depth)

    def _all(self, given: Mapping[str, Any], field: str, depth: int) -> list[str]:
        return [self.of(each, field, depth) or '""' for each in _list(given, field, dict)]

    def _json(self, given: Mapping[str, Any], depth: int) -> str:
        style = given.get("style", "json")
        if style != "json":
            raise ValueError(f"style = {style!r}: must be 'json'")
        schema = given.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise ValueError("json_schema: must be a JSON schema")
        return self._new(json_rule(schema))

    def _any_text(self, given: Mapping[str, Any]) -> str:
        if given.get("excludes"):
            raise ValueError("excludes: must be absent")
        return self._new(ANY_TEXT, terminal=True)

    def _tag(self, given: Mapping[str, Any], depth: int, begun: str = "") -> str:
        """begun: how much of its beginning is there."""
        begin = self._literal(_text(given, "begin")[len(begun) :])
        ends = given.get("end")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not ends or not all(isinstance(end, str) for end in ends):
            raise ValueError("end: must be a text or a list of texts")
        content = given.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            return self._new(f"{begin} {self._until(content, ends)}")
        closed = " | ".join(self._literal(end) or '""' for end in ends)
        return self._new(f"{begin} {self._content(given, depth)} ({closed})")

    def _until(self, content: Mapping[str, Any], ends: Sequence[str]) -> str:
        """Any text up to the first of these ends, and that."""
        text = self._any_text(content)
        if all(self._literal(end) == quoted(end) for end in ends):
            closed = " | ".join(quoted(end) for end in ends)
            return self._new(f"{text} ({closed})", options="[lazy]")
        return f"{text} ({' | '.join(self._literal(end) for end in ends)})"

    def _triggered(self, given: Mapping[str, Any], depth: int) -> str:
        """Text, tags behind their triggers, text."""
        if given.get("excludes"):
            raise ValueError("excludes: must be absent")
        triggers, tags = _list(given, "triggers", str), _list(given, "tags", dict)
        text = self._new(ANY_TEXT, terminal=True)
        parts, firsts = list[str](), list[str]()
        for trigger in triggers:
            mine = [tag for tag in tags if _trigger_of(tag, triggers) == trigger]
            if not mine:
                continue
            rest = self._new(" | ".join(self._tag(tag, depth, begun=trigger) for tag in mine))
            opened = self._literal(trigger)
            lazy = opened == quoted(trigger)
            opening = self._new(f"{text} {opened}", options="[lazy]" if lazy else "")
            parts.append(f"{opening} {rest}")
            firsts.append(f"{opened} {rest}")
        part, first = self._new(" | ".join(parts)), self._new(" | ".join(firsts))
        if given.get("stop_after_first"):
            return first if given.get("at_least_one") else f"({part} | {text})"
        behind = f"({part})* {text}"
        return f"{first} {behind}" if given.get("at_least_one") else behind

    def _separated(self, given: Mapping[str, Any], depth: int) -> str:
        tag = self._new(" | ".join(self._tag(each, depth) for each in _list(given, "tags", dict)))
        more = f"({self._literal(_text(given, 'separator'))} {tag})*"
        some = tag if given.get("stop_after_first") else f"{tag} {more}"
        return some if given.get("at_least_one") else f"({some})?"


def _trigger_of(tag: Mapping[str, Any], triggers: Sequence[str]) -> str:
    """The trigger that a tag begins with. Raises: ValueError without one."""
    begin = _text(tag, "begin")
    found = [trigger for trigger in triggers if begin.startswith(trigger)]
    if not found:
        raise ValueError(f"begin = {begin[:80]!r}: must start with one of the triggers")
    return max(found, key=len)


def _text(given: Mapping[str, Any], field: str) -> str:
    value = given.get(field)
    if not isinstance(value, str):
        raise ValueError(f"{field} = {value!r}: must be a text"[:200])
    return value


def _list(given: Mapping[str, Any], field: str, kind: type) -> list[Any]:
    value = given.get(field)
    if not isinstance(value, list) or not value or not all(isinstance(each, kind) and each for each in value):
        raise ValueError(f"{field}: must be a list of at least one")
    return value
