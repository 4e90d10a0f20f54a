"""[2] Metadata of a Generate call, as proxies and tracers set it.

    x-data-parallel-rank  0 to ranks - 1; as the field dp_rank
    x-priority            an int32; as the field priority
    traceparent           W3C Trace Context; passed on to the log line of the request
    epserver-node         between nodes only: the node that was called (`Entrance`)

A number that the message gives too must be equal. A malformed traceparent counts as absent, as its standard
requires.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ep_server.errors import InvalidArgument

RANK_KEY = "x-data-parallel-rank"
PRIORITY_KEY = "x-priority"
TRACE_KEY = "traceparent"
NODE_KEY = "epserver-node"
SHOWN = 80  # characters of a value that an error message repeats

_INTEGER = re.compile(r"-?[0-9]{1,10}")
# Version, trace id, parent id, flags; version 00 has no more, later ones may.
_TRACE = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-.*)?"
)


@dataclass(frozen=True, slots=True)
class CallMetadata:
    """None and "" where the call says nothing."""

    dp_rank: int | None = None
    priority: int | None = None
    traceparent: str = ""

    @staticmethod
    def of(pairs: Iterable[tuple[str, str | bytes]]) -> CallMetadata:
        """Reads the metadata of a call; the last value of a repeated key counts. Raises: InvalidArgument."""
        values = {key: value for key, value in pairs if isinstance(value, str)}
        return CallMetadata(
            dp_rank=_integer(values, RANK_KEY, 0, 2**32 - 1),
            priority=_integer(values, PRIORITY_KEY, -(2**31), 2**31 - 1),
            traceparent=_trace(values.get(TRACE_KEY, "")),
        )


@dataclass(frozen=True, slots=True)
class Entrance:
    """The port of a call, and the ranks of the node that was called.

    nodes, ranks_per_node: of the whole server. relays: the port is for other nodes alone, which say where a
    call came from. Other ports ignore that key, and their calls count as node 0's.
    """

    nodes: int = 1
    ranks_per_node: int = 0
    relays: bool = False

    def near(self, pairs: Iterable[tuple[str, str | bytes]]) -> range:
        """Global ranks of the node that a call came to; empty with one node. Raises: InvalidArgument."""
        if self.nodes == 1:
            return range(0)
        values = {key: value for key, value in pairs if isinstance(value, str)} if self.relays else {}
        node = _integer(values, NODE_KEY, 0, self.nodes - 1) or 0
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)


def agreed(key: str, told: int | None, given: int | None) -> int | None:
    """The number of the metadata or of the message. Raises: InvalidArgument where they differ."""
    if told is not None and given is not None and told != given:
        raise InvalidArgument(key, told, f"absent or {given}, which the message gives")
    return told if given is None else given


def _integer(values: dict[str, str], key: str, low: int, high: int) -> int | None:
    text = values.get(key)
    if text is None:
        return None
    if not _INTEGER.fullmatch(text) or not low <= int(text) <= high:
        raise InvalidArgument(key, text[:SHOWN], f"a whole number, {low} to {high}")
    return int(text)


def _trace(text: str) -> str:
    match = _TRACE.fullmatch(text)
    return text if match and not (match["more"] and text.startswith("00")) else ""
