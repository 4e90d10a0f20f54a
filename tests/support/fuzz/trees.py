"""Hypothesis strategies of JSON and TOML: valid trees that were changed, as trees or as bytes."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

from tests.support.fuzz.messages import edited

ODD = (
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, -(2**64), 10**30, 0.0, -0.5, 1e308, "", "a", "1", "\x00",
    "ü", "/", "..", "x" * 3000, [], {}, [[]], {"": None}, [0, 1], ["a"], {"a": {"a": {}}}, [1] * 50,
)  # fmt: skip
DEEP = b"[" * 100_000


def _places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all nodes; of long lists only the first ones."""
    found = [path]
    keys = (
        list(tree) if isinstance(tree, dict) else range(min(len(tree), 4)) if isinstance(tree, list) else []
    )
    for key in keys:
        found += _places(tree[key], (*path, key))
    return found


@st.composite
def changed_tree(draw: st.DrawFn, tree: Any) -> Any:
    """The tree with some of its nodes replaced, removed, moved or added."""
    found = copy.deepcopy(tree)
    for _ in range(draw(st.sampled_from((1, 1, 2, 3)))):
        path = draw(st.sampled_from(_places(found)))
        if not path:
            continue
        above = found
        for key in path[:-1]:
            above = above[key]
        match draw(st.sampled_from(("replace", "replace", "replace", "remove", "add"))):
            case "replace":
                above[path[-1]] = copy.deepcopy(draw(st.sampled_from(ODD)))
            case "remove":
                del above[path[-1]]
            case "add" if isinstance(above, dict):
                above[draw(st.sampled_from(("a", "", "x" * 300)))] = copy.deepcopy(draw(st.sampled_from(ODD)))
            case "add":
                above.append(copy.deepcopy(draw(st.sampled_from(ODD))))
    return found


@st.composite
def json_files(draw: st.DrawFn, tree: Any) -> bytes:
    """A JSON file of the changed tree; sometimes its bytes are changed, or it is no such file at all."""
    kind = draw(st.integers(0, 9))
    if kind == 9:
        return draw(st.sampled_from((b"", b"\xff\xfe", b"null", b"[]", b'""', DEEP, b'{"a":' + DEEP)))
    data = json.dumps(draw(changed_tree(tree))).encode()
    return draw(edited(data)) if kind == 8 else data
