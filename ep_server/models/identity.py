"""Identifies the KV of a model, by format and weights. Needs no torch."""

from __future__ import annotations

from hashlib import blake2b
from itertools import groupby

from ep_server.errors import CheckpointError
from ep_server.models.checkpoint import Checkpoint
from ep_server.models.families.spec import ModelSpec
from ep_server.models.sizes import Dtype

DIGEST_BYTES = 16
SAMPLE_BYTES = 256  # of each tensor: an update may leave others as they are


def kv_format(spec: ModelSpec, dtype: Dtype, kv_dtype: Dtype) -> str:
    """Names what two servers must agree on to use each other's KV: for people, with a digest of the rest."""
    digest = blake2b(repr(spec).encode(), digest_size=4).hexdigest()
    return f"{spec.family}/{spec.num_layers}x{spec.hidden}/{dtype}/kv-{kv_dtype}/{digest}"


def weights_digest(path: str) -> str:
    """Of a checkpoint directory: names and shapes of all tensors, and bytes from the middle of each.

    Raises: CheckpointError if a file cannot be read.
    """
    digest, tensors = blake2b(digest_size=DIGEST_BYTES), Checkpoint.open(path).tensors
    by_place = sorted(tensors.values(), key=lambda tensor: (tensor.file, tensor.begin))
    samples = dict[str, bytes]()
    try:
        for file, stored in groupby(by_place, key=lambda tensor: tensor.file):
            with file.open("rb") as content:
                for tensor in stored:
                    content.seek(tensor.begin + max(0, tensor.nbytes - SAMPLE_BYTES) // 2)
                    samples[tensor.name] = content.read(min(SAMPLE_BYTES, tensor.nbytes))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    for name, tensor in sorted(tensors.items()):  # however they are cut into files
        digest.update(f"{name}:{tensor.dtype}{list(tensor.shape)};".encode() + samples[tensor.name])
    return digest.hexdigest()
