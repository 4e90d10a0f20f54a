"""A checkpoint whose experts nobody may read any more."""

from __future__ import annotations

from pathlib import Path

from ep_server.models.checkpoint import Checkpoint


def poison_experts(path: Path) -> int:
    """Overwrites the tensors of experts with NaN, in place. Returns: how many there were."""
    stored = [tensor for name, tensor in Checkpoint.open(path).tensors.items() if ".experts." in name]
    for tensor in stored:
        with tensor.file.open("r+b") as file:
            file.seek(tensor.begin)
            file.write(b"\xff" * tensor.nbytes)
    return len(stored)
