"""A checkpoint whose experts nobody may read any more."""

from __future__ import annotations

import os
from pathlib import Path

from ep_server.models.checkpoint import Checkpoint


def poison_experts(path: Path) -> int:
    """Overwrites the tensors of experts with NaN, in place. Returns: how many there were.

    Times of files stay: ranks would refuse files that have changed, and not read them.
    """
    stored = [tensor for name, tensor in Checkpoint.open(path).tensors.items() if ".experts." in name]
    stats = {tensor.file: tensor.file.stat() for tensor in stored}
    for tensor in stored:
        with tensor.file.open("r+b") as file:
            file.seek(tensor.begin)
            file.write(b"\xff" * tensor.nbytes)
    for file, stat in stats.items():
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return len(stored)
