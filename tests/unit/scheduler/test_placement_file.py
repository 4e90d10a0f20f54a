"""Placement files: what is written is read again, and what is wrong in one is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ep_server.errors import ConfigError, InvalidArgument
from ep_server.ranks.slots import read_placement
from ep_server.records import EMPTY
from ep_server.scheduler import Placement, first_placement
from ep_server.scheduler.placement_file import placement_from, placement_values

LIKE = first_placement(2, 4, 3, (0, 1), 2)
MOVED = Placement(
    4, 3, ((0, 1, 2, 2, 3, EMPTY), (3, 1, 0, 2, 3, 1)), ((1, 1, 5, 19, 1, 0), (0, 1, 1, 1, 1, 0))
)


def changed(path: list[Any], value: Any) -> Any:
    values = placement_values(MOVED)
    at: Any = values
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return values


def test_a_placement_is_read_as_it_was_written() -> None:
    values = json.loads(json.dumps(placement_values(MOVED)))
    assert placement_from(values, LIKE, (0, 1)) == MOVED
    assert values["version"] == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "placement = 'list': must be an object"),
        (changed(["more"], 1), r"placement = \['more'\]: must be without unknown fields"),
        (changed(["version"], 2), "version = 2: must be 1"),
        (changed(["version"], True), "version = True: must be 1"),
        (changed(["num_experts"], 8), "num_experts = 8: must be 4"),
        (changed(["slots_per_rank"], None), "slots_per_rank = None: must be 3"),
        (changed(["layers"], []), "layers = 0: must be a list of 2 layers"),
        (changed(["layers"], 7), "layers = 7: must be a list of 2 layers"),
        (changed(["layers", 1], 7), r"layers\[1\] = 'int': must be an object"),
        (changed(["layers", 1, "serves"], [1]), r"layers\[1\]\.serves = 1: must be a list of 6"),
        (changed(["layers", 1, "experts", 2], 4), r"layers\[1\]\.experts\[2\] = 4: must be -1 to 3"),
        (changed(["layers", 1, "experts", 2], 0.5), r"layers\[1\]\.experts\[2\] = 0\.5: must be -1 to 3"),
        (changed(["layers", 0, "serves", 2], 25), r"layers\[0\]\.serves\[2\] = 25: must be 0 to 24"),
        (changed(["layers", 0, "serves", 5], 1), r"layers\[0\]\.serves\[5\] = 1: must be 0 in an empty slot"),
        (
            changed(["layers", 0, "serves", 4], 0),
            r"layers\[0\]\.serves = \[3\]: must be not 0 for each expert",
        ),
    ],
)
def test_what_is_wrong_is_named(values: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        placement_from(values, LIKE, (0, 1))


def test_experts_must_be_served_by_ranks_that_start() -> None:
    with pytest.raises(InvalidArgument, match=r"layers\[0\]\.serves = \[3\]"):
        placement_from(placement_values(MOVED), LIKE, (0,))


def test_errors_of_a_file_name_the_option(tmp_path: Any) -> None:
    file = tmp_path / "placement.json"
    file.write_text(json.dumps(placement_values(MOVED)))
    assert read_placement(str(file), LIKE, (0, 1)) == MOVED
    for content, allowed in (("{", "JSON"), ("[" * 100_000, "JSON"), ("{}", "version = None: must be 1")):
        file.write_text(content)
        with pytest.raises(ConfigError, match=rf"resilience\.placement = .*{allowed}"):
            read_placement(str(file), LIKE, (0, 1))
    with pytest.raises(ConfigError, match="a readable file: No such file"):
        read_placement(str(tmp_path / "none"), LIKE, (0, 1))
