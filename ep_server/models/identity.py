"""Identifies the KV of a model, by format and weights. Needs no torch."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from ep_server.errors import CheckpointError
from ep_server.models.families.spec import ModelSpec
from ep_server.models.sizes import Dtype

DIGEST_BYTES = 16
SAMPLES = 16  # of each file
SAMPLE_BYTES = 4096


def kv_format(spec: ModelSpec, dtype: Dtype, kv_dtype: Dtype) -> str:
    """Names what two servers must agree on to use each other's KV: for people, with a digest of the rest."""
    digest = blake2b(repr(spec).encode(), digest_size=4).hexdigest()
    return f"{spec.family}/{spec.num_layers}x{spec.hidden}/{dtype}/kv-{kv_dtype}/{digest}"


def weights_digest(path: str) -> str:
    """Of a checkpoint directory: names and sizes of its safetensors, and samples of their bytes.

    Raises: CheckpointError if a file cannot be read.
    """
    digest = blake2b(digest_size=DIGEST_BYTES)
    try:
        for file in sorted(Path(path).glob("*.safetensors")):
            size = file.stat().st_size
            digest.update(f"{file.name}:{size};".encode())
            with file.open("rb") as content:
                for sample in range(SAMPLES):
                    content.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                    digest.update(content.read(SAMPLE_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    return digest.hexdigest()
