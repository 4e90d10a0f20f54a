"""Which GPU a rank under test has: ranks take them in turn, and share them where there are fewer."""

from __future__ import annotations

import torch


def gpu_of(rank: int) -> int:
    """Its ordinal. Needs a GPU."""
    return rank % torch.cuda.device_count()


def shared_by(num_ranks: int) -> bool:
    """Whether some of so many ranks have the same GPU: their kernels take turns there, so all is slow."""
    return num_ranks > torch.cuda.device_count()
