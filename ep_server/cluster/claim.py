"""What this node is: plans its ranks, reads the headers of its checkpoint. Translates claims to the wire."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ep_server
from ep_server.cluster.agreement import Claim, TensorHeader, fingerprint
from ep_server.config import Config
from ep_server.errors import InvalidArgument
from ep_server.models.checkpoint import Checkpoint, read_json
from ep_server.ranks.group import GroupPlan, plan_group
from ep_server.v1 import nodes_pb2 as pb

MAX_HELLO = 4 << 20  # characters; that of the largest known model has less than a tenth


def claim_of(config: Config) -> tuple[Claim, GroupPlan]:
    """Reads headers only; blocks. Raises: ConfigError, CheckpointError, StartupError."""
    plan = plan_group(config)
    description = read_json(Path(config.model.path) / "config.json")
    model = fingerprint(description, _tensors(config))
    node = max(config.cluster.node_rank, 0)
    return Claim(node, ep_server.__version__, config.values(), _plain(model), plan.kv_blocks), plan


def hello_of(claim: Claim) -> pb.Hello:
    """The first message of a node that joins."""
    return pb.Hello(
        node=claim.node,
        version=claim.version,
        config_json=json.dumps(claim.config),
        model_json=json.dumps(claim.model),
        kv_blocks=claim.kv_blocks,
    )


def claim_in(hello: pb.Hello) -> Claim:
    """The claim that hello_of was given. Raises: InvalidArgument."""
    size = len(hello.config_json) + len(hello.model_json)
    if size > MAX_HELLO:  # before it is parsed: that would hold up node 0
        raise InvalidArgument("hello", f"{size} characters", f"at most {MAX_HELLO}")
    try:
        config, model = json.loads(hello.config_json), json.loads(hello.model_json)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("hello", str(error), "JSON in config_json and model_json") from error
    if not isinstance(config, dict) or not isinstance(model, dict):
        raise InvalidArgument("hello", "no objects", "JSON objects in config_json and model_json")
    return Claim(hello.node, hello.version, config, model, hello.kv_blocks)


def _tensors(config: Config) -> Iterator[TensorHeader]:
    if config.model.load_format == "dummy":
        return
    for tensor in Checkpoint.open(config.model.path).tensors.values():
        yield TensorHeader(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """As they are after a way over the wire, so that they compare equal."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain
