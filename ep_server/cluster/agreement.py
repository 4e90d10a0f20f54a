"""What a node says of itself when it joins, and where that differs from node 0. Pure: reads nothing.

Options that are a node's own affair are listed here; every other option of the configuration must agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Of one node alone, whole sections and single options.
_OWN_SECTIONS = frozenset({"grpc", "metrics", "log"})
_OWN = frozenset(
    {
        "model.path",
        "model.name",  # node 0 answers, whatever node is asked
        "parallel.threads_per_rank",
        "cluster.node_rank",
        "cluster.rendezvous",  # may be spelled in several ways; who came found it
        "cluster.hostfile",
        "cluster.token_file",
        "cluster.tls_cert",
        "cluster.tls_key",
        "cluster.tls_ca",
        "cluster.connect_seconds",
        "fabric.library",
        "fabric.domain",
        "fabric.address",
        "fabric.interface",
        "fabric.gid_index",
    }
)
_NOTES = frozenset({"_name_or_path", "transformers_version"})  # of config.json, without meaning for a model
SHOWN = 8  # differences named in one line
LAYER_PARTS = 3  # "model.layers.7" of "model.layers.7.mlp.gate.weight"


@dataclass(frozen=True, slots=True)
class Claim:
    """What a node is.

    config: every option by its dotted name. model: a fingerprint of its checkpoint by name.
    kv_blocks: of each of its ranks, as its memory allows; the group takes the least.
    """

    node: int
    version: str
    config: Mapping[str, Any]
    model: Mapping[str, Any]
    kv_blocks: int


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor as the header of its file describes it. Units: bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def must_agree(option: str) -> bool:
    """Whether an option, by its dotted name, must have one value on all nodes."""
    return option not in _OWN and option.partition(".")[0] not in _OWN_SECTIONS


def fingerprint(config_json: Mapping[str, Any], tensors: Iterable[TensorHeader]) -> dict[str, Any]:
    """A checkpoint without its weights: each value of config.json, and each layer's tensors in one line."""
    found = {f"config.json {name}": value for name, value in config_json.items() if name not in _NOTES}
    layers: dict[str, list[TensorHeader]] = {}
    for tensor in tensors:
        layers.setdefault(_layer(tensor.name), []).append(tensor)
    return found | {f"tensors {layer}": _line(held) for layer, held in sorted(layers.items())}


def differences(leader: Claim, other: Claim) -> list[str]:
    """One line for each thing in which a node differs from node 0; of another version, that alone."""
    if other.version != leader.version:
        return [f"version {_short(other.version)}, node {leader.node} has {leader.version}"]
    options = sorted({*leader.config, *other.config})
    found = [_option(name, leader, other) for name in options if must_agree(name)]
    found += [_model(name, leader, other) for name in sorted({*leader.model, *other.model})]
    return [line for line in found if line]


def refusal(leader: Claim, other: Claim, nodes: int, joined: Iterable[int]) -> str:
    """Why a node cannot join, in one line; "" if it can. nodes: of the server. joined: that are there."""
    if not 1 <= other.node < nodes:
        return f"cluster.node_rank = {other.node}: must be 1 to {nodes - 1}, node 0 has {nodes} nodes"
    if other.node in joined:
        return f"cluster.node_rank = {other.node}: another node joined under this number"
    found = differences(leader, other)
    if not found:
        return ""
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"node {other.node}: {'; '.join(found[:SHOWN])}{more}"


def _option(name: str, leader: Claim, other: Claim) -> str:
    theirs, ours = other.config.get(name, "absent"), leader.config.get(name, "absent")
    if theirs == ours:
        return ""
    return f"{_short(name)} = {_short(repr(theirs))}, node {leader.node} has {_short(repr(ours))}"


def _model(name: str, leader: Claim, other: Claim) -> str:
    theirs, ours = other.model.get(name, "absent"), leader.model.get(name, "absent")
    if theirs == ours:
        return ""
    return f"model: {_short(name)} = {_short(theirs)}, node {leader.node} has {_short(ours)}"


def _short(value: Any) -> str:
    """Of one line and no great length, whatever another node sends."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _layer(name: str) -> str:
    """The part of a tensor's name down to the first number in it; without one, all of it."""
    parts = name.split(".")
    for position, part in enumerate(parts[:LAYER_PARTS]):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return name


def _line(tensors: Iterable[TensorHeader]) -> str:
    held = sorted(tensors, key=lambda tensor: tensor.name)
    digest = hashlib.sha256()
    for tensor in held:
        digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape} {tensor.nbytes}\n".encode())
    size = sum(tensor.nbytes for tensor in held)
    return f"{len(held)} tensors, {size} bytes, {digest.hexdigest()[:16]}"
