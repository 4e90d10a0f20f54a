"""Identifies the KV of a model, by format and weights, and the files of the weights. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from itertools import groupby
from pathlib import Path

from ep_server.errors import CheckpointError, ConfigError
from ep_server.models.checkpoint import Checkpoint
from ep_server.models.families.spec import ModelSpec
from ep_server.models.sizes import Dtype

DIGEST_BYTES = 16
SAMPLE_BYTES = 256  # of a tensor
MOST_SAMPLES = 1024  # where a start waits for them: of 90,000 tensors, each read alone


def kv_format(spec: ModelSpec, dtype: Dtype, kv_dtype: Dtype) -> str:
    """Names what two servers must agree on to use each other's KV: for people, with a digest of the rest."""
    digest = blake2b(repr(spec).encode(), digest_size=4).hexdigest()
    return f"{spec.family}/{spec.num_layers}x{spec.hidden}/{dtype}/kv-{kv_dtype}/{digest}"


def weights_digest(path: str) -> str:
    """Of a checkpoint directory: names and shapes of all tensors, and bytes from the middle of each.

    An update may leave most tensors as they are. Raises: CheckpointError if a file cannot be read.
    """
    checkpoint = Checkpoint.open(path)
    return _content(checkpoint, checkpoint.tensors)


def files_identity(path: str) -> str:
    """Of the files of a checkpoint directory, as they are now. Raises: CheckpointError."""
    checkpoint = Checkpoint.open(path)
    return f"{files_stamp(checkpoint)}:{_content(checkpoint, _some(checkpoint))}"


def files_stamp(checkpoint: Checkpoint) -> str:
    """Size and time of each shard. Raises: CheckpointError if one is gone."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for shard in checkpoint.shards:
        try:
            stat = shard.stat()
        except OSError as error:
            raise CheckpointError(f"{shard}: shard cannot be read ({error.strerror})") from error
        digest.update(f"{shard.name}:{stat.st_size}:{stat.st_mtime_ns};".encode())
    return digest.hexdigest()


def check_files(checkpoint: Checkpoint, identity: str) -> None:
    """Files that were only written again hold the same weights. identity: of files_identity(); "" = any.

    Raises: ConfigError if they hold others; CheckpointError.
    """
    stamp, _, content = identity.partition(":")
    if (
        identity
        and (now := files_stamp(checkpoint)) != stamp
        and _content_now(checkpoint.path, now) != content
    ):
        allowed = (
            "unchanged while it is served, and alike on all nodes: its files hold other weights now than the "
            "ranks have loaded"
        )
        raise ConfigError("model.path", str(checkpoint.path), allowed)


@lru_cache(1)
def _content_now(path: Path, _stamp: str) -> str:
    checkpoint = Checkpoint.open(path)
    return _content(checkpoint, _some(checkpoint))


def _some(checkpoint: Checkpoint) -> list[str]:
    """Names of tensors of all kinds and layers."""
    return sorted(checkpoint.tensors, key=lambda name: blake2b(name.encode()).digest())[:MOST_SAMPLES]


def _content(checkpoint: Checkpoint, sampled: Iterable[str]) -> str:
    """sampled: names of the tensors to read bytes of."""
    digest, tensors = blake2b(digest_size=DIGEST_BYTES), checkpoint.tensors
    by_place = sorted((tensors[name] for name in sampled), key=lambda tensor: (tensor.file, tensor.begin))
    samples = dict[str, bytes]()
    try:
        for file, stored in groupby(by_place, key=lambda tensor: tensor.file):
            with file.open("rb") as content:
                for tensor in stored:
                    content.seek(tensor.begin + max(0, tensor.nbytes - SAMPLE_BYTES) // 2)
                    samples[tensor.name] = content.read(min(SAMPLE_BYTES, tensor.nbytes))
    except OSError as error:
        raise CheckpointError(f"{checkpoint.path}: cannot be read ({error})") from error
    for name, tensor in sorted(tensors.items()):  # however they are cut into files
        digest.update(f"{name}:{tensor.dtype}{list(tensor.shape)};".encode() + samples.get(name, b""))
    return digest.hexdigest()
