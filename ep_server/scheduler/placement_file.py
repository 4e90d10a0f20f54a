"""Placements as JSON values, for files that outlive a server. Pure.

{"version": 1, "num_experts": E, "slots_per_rank": S, "layers": [{"experts": [...], "serves": [...]}, ...]}:
by slot of all ranks, the expert that it holds (-1 = none) and its part of that expert's tokens (0 = none).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ep_server.errors import InvalidArgument
from ep_server.records import EMPTY, WAYS
from ep_server.scheduler.placement import Placement

VERSION = 1


def placement_values(placement: Placement) -> dict[str, Any]:
    """A placement as JSON can hold it."""
    layers = zip(placement.experts, placement.serves, strict=True)
    return {
        "version": VERSION,
        "num_experts": placement.num_experts,
        "slots_per_rank": placement.slots_per_rank,
        "layers": [
            {"experts": list(held), "serves": [int(part) for part in serves]} for held, serves in layers
        ],
    }


def placement_from(values: Any, like: Placement, live: Collection[int]) -> Placement:
    """The placement that placement_values() was given.

    Args:
        values: of unknown content. like: a placement of the same sizes. live: ranks that must serve
          each expert.
    Raises: InvalidArgument, with the field, its value and what is allowed.
    """
    _check(isinstance(values, dict), "placement", type(values).__name__, "an object")
    unknown = sorted(set(values) - {"version", "num_experts", "slots_per_rank", "layers"})
    _check(not unknown, "placement", unknown, "without unknown fields")
    for name, wanted in (
        ("version", VERSION),
        ("num_experts", like.num_experts),
        ("slots_per_rank", like.slots_per_rank),
    ):
        _check(_is_int(values.get(name)) and values[name] == wanted, name, values.get(name), f"{wanted}")
    layers, wanted = values.get("layers"), len(like.experts)
    found = len(layers) if isinstance(layers, list) else layers
    _check(isinstance(layers, list) and found == wanted, "layers", found, f"a list of {wanted} layers")
    read = [_layer(layer, number, like) for number, layer in enumerate(layers)]
    placement = Placement(
        like.num_experts,
        like.slots_per_rank,
        tuple(experts for experts, _ in read),
        tuple(serves for _, serves in read),
    )
    for number in range(wanted):
        _check_served(placement, number, live)
    return placement


def _layer(values: Any, number: int, like: Placement) -> tuple[tuple[int, ...], tuple[int, ...]]:
    where = f"layers[{number}]"
    _check(isinstance(values, dict), where, type(values).__name__, "an object")
    slots = len(like.experts[0])
    columns = []
    for name, low, high in (("experts", EMPTY, like.num_experts - 1), ("serves", 0, WAYS)):
        column = values.get(name)
        found = len(column) if isinstance(column, list) else column
        _check(isinstance(column, list) and found == slots, f"{where}.{name}", found, f"a list of {slots}")
        for slot, value in enumerate(column):
            fits = _is_int(value) and low <= value <= high
            _check(fits, f"{where}.{name}[{slot}]", value, f"{low} to {high}")
        columns.append(tuple(column))
    experts, serves = columns
    for slot, (expert, part) in enumerate(zip(experts, serves, strict=True)):
        _check(expert != EMPTY or not part, f"{where}.serves[{slot}]", part, "0 in an empty slot")
    return experts, serves


def _check_served(placement: Placement, layer: int, live: Collection[int]) -> None:
    serving = {
        expert
        for slot, expert in enumerate(placement.experts[layer])
        if placement.serves[layer][slot] and slot // placement.slots_per_rank in live
    }
    missing = sorted(set(range(placement.num_experts)) - serving)
    _check(not missing, f"layers[{layer}].serves", missing, f"not 0 for each expert on ranks {sorted(live)}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(fits: bool, field: str, value: Any, allowed: str) -> None:
    if not fits:
        raise InvalidArgument(field, value, allowed)
