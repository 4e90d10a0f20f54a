"""A checkpoint like another one, with other values."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def perturbed(path: Path, into: Path, seed: int = 1, share: float = 0.5) -> Path:
    """Copies a checkpoint and adds noise, `share` of each tensor's deviation. Returns: `into`."""
    shutil.copytree(path, into)
    draw = torch.Generator().manual_seed(seed)
    for file in sorted(into.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in list(opened.keys())}
        for name, tensor in tensors.items():
            noise = torch.randn(tensor.shape, generator=draw) * tensor.float().std(correction=0) * share
            most = torch.finfo(tensor.dtype).max  # codes of FP8 often are the largest one
            tensors[name] = (tensor.float() + noise).clamp(-most, most).to(tensor.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    return into
