"""Turns a grammar into a program: the notation of llguidance, which is Lark with JSON schemas inside.

Raises ValueError with the reason where the source is malformed. What else is wrong, the library finds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from llguidance import gbnf_to_lark as gbnf

from ep_server.records import Grammar, GrammarKind
from ep_server.text.grammars import structural_tags
from ep_server.text.grammars.lark import json_rule, quoted, regex

WHOLE = "the-whole-output"  # the root rule, under a name of its own


def program_of(grammar: Grammar, special: Mapping[str, int]) -> str:
    """The program of a grammar.

    Args:
        special: id of each special token, by its text.
    Raises: ValueError.
    """
    source = grammar.source
    if grammar.kind is GrammarKind.PROGRAM:
        return source
    if grammar.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT):
        return f"start: {json_rule(_schema(source) if source else {'type': 'object'})}"
    if grammar.kind is GrammarKind.REGEX:
        return f"start: WHOLE\nWHOLE: {regex(source)}"
    if grammar.kind is GrammarKind.CHOICE:
        # One terminal: the library matches it as one automaton, however many there are.
        return "start: WHOLE\nWHOLE: " + " | ".join(quoted(text) for text in json.loads(source))
    if grammar.kind is GrammarKind.EBNF:
        return _lark_of_gbnf(source)
    return structural_tags.program_of(source, special)


def _lark_of_gbnf(source: str) -> str:
    """A GBNF grammar as Lark.

    A terminal of Lark takes as much text as it can. A grammar without recursion becomes one terminal, which
    is exact. In others each rule without recursion becomes a terminal.
    """
    try:
        rules = gbnf.GrammarParser().parse(source)
        if WHOLE in rules or "root" not in rules:
            raise ValueError(f"there must be a rule root, and none {WHOLE}")
        root = rules[WHOLE] = rules.pop("root")
        root.name = WHOLE
        for node in _references(list(rules.values())):
            node.name = WHOLE if node.name == "root" else node.name
        start = gbnf.SequenceNode([gbnf.RuleRefNode(WHOLE)])
        rules["root"] = gbnf.RuleNode("root", gbnf.AlternativeNode([start]), "")
        gbnf.resolve(rules)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except Exception as error:  # the library raises bare Exception
        raise ValueError(str(error)) from error
    return "\n".join(str(rule) for rule in rules.values())


def _references(nodes: list[gbnf.ASTNode]) -> Iterator[gbnf.RuleRefNode]:
    while nodes:
        node = nodes.pop()
        nodes += node.children()
        if isinstance(node, gbnf.RuleRefNode):
            yield node


def _schema(source: str) -> object:
    try:
        schema = json.loads(source)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise ValueError("a JSON schema is an object")
    return schema
