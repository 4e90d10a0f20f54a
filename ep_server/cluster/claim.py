"""A node's claim when it joins: its ranks, checkpoint and options, and where they differ from node 0's.

Options that each node sets for itself are listed here. Every other option must agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ep_server
from ep_server.config import Config
from ep_server.errors import InvalidArgument
from ep_server.models.checkpoint import Checkpoint, read_json
from ep_server.ranks.group import GroupPlan, plan_group
from ep_server.v1 import nodes_pb2 as pb

# Sections and options that each node sets for itself.
_OWN_SECTIONS = frozenset({"grpc", "metrics", "log"})
_OWN = frozenset(
    {
        "model.path",
        "model.name",  # node 0 answers, whatever node is asked
        "parallel.threads_per_rank",
        "cluster.node_rank",
        "cluster.rendezvous",  # may be spelled in several ways; a node that connected has found it
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
        "handoff.host",
    }
)
_NOTES = frozenset({"_name_or_path", "transformers_version"})  # of config.json; do not affect the model
SHOWN = 8  # differences named in one line
LAYER_PARTS = 3  # "model.layers.7" of "model.layers.7.mlp.gate.weight"


@dataclass(frozen=True, slots=True)
class Claim:
    """What a node offers.

    config: every option by its dotted name. model: a fingerprint of its checkpoint by name.
    """

    node: int
    version: str
    config: Mapping[str, Any]
    model: Mapping[str, Any]


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
    """One line per difference from node 0; if the versions differ, only that line."""
    if other.version != leader.version:
        return [f"version {_short(other.version)}, node {leader.node} has {leader.version}"]
    options = sorted({*leader.config, *other.config})
    found = [_option(name, leader, other) for name in options if must_agree(name)]
    found += [_model(name, leader, other) for name in sorted({*leader.model, *other.model})]
    return [line for line in found if line]


def refusal(leader: Claim, other: Claim, nodes: int, joined: Iterable[int]) -> str:
    """Why a node cannot join, in one line; "" if it can. nodes: their number. joined: node ranks."""
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
    """One printable line of at most 80 characters, whatever another node sent."""
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


MAX_HELLO = 4 << 20  # characters; the largest known model needs less than a tenth


def claim_of(config: Config) -> tuple[Claim, GroupPlan]:
    """Reads headers only; blocks. Raises: ConfigError, CheckpointError; StartupError: it does not fit."""
    plan = plan_group(config)
    description = read_json(Path(config.model.path) / "config.json")
    model = fingerprint(description, _tensors(config))
    node = max(config.cluster.node_rank, 0)
    return Claim(node, ep_server.__version__, config.values(), _plain(model)), plan


def hello_of(claim: Claim) -> pb.Hello:
    """The first message of a node that joins."""
    return pb.Hello(
        node=claim.node,
        version=claim.version,
        config_json=json.dumps(claim.config),
        model_json=json.dumps(claim.model),
    )


def claim_in(hello: pb.Hello) -> Claim:
    """The claim that hello_of was given. Raises: InvalidArgument."""
    size = len(hello.config_json) + len(hello.model_json)
    if size > MAX_HELLO:  # checked before parsing, which would block node 0
        raise InvalidArgument("hello", f"{size} characters", f"at most {MAX_HELLO}")
    try:
        config, model = json.loads(hello.config_json), json.loads(hello.model_json)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("hello", str(error), "JSON in config_json and model_json") from error
    if not isinstance(config, dict) or not isinstance(model, dict):
        raise InvalidArgument("hello", "no objects", "JSON objects in config_json and model_json")
    return Claim(hello.node, hello.version, config, model)


def _tensors(config: Config) -> Iterator[TensorHeader]:
    if config.model.load_format == "dummy":
        return
    for tensor in Checkpoint.open(config.model.path).tensors.values():
        yield TensorHeader(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """As they arrive after serialisation, so that they compare equal."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain
