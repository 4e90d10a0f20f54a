"""Checkpoints with scales of an FP8 cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ep_server.models.families import read_spec
from tests.support.models.checkpoints import Tiny
from tests.support.triton.harness import DEVICE


def with_scales(tiny: Tiny, target: Path) -> tuple[Path, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A copy with scales for every layer but the first, and the scales of all layers."""
    shutil.copytree(tiny.path, target)
    tensors = load_file(target / "model.safetensors")
    spec, given = read_spec(tiny.path), []
    heads = getattr(spec.attention, "kv_heads", 1)
    for layer in range(spec.num_layers):
        scales = [torch.ones(heads)] * 2
        if layer:
            scales = [torch.linspace(0.013, 0.031, heads), torch.linspace(0.017, 0.005, heads)]
            for kind, scale in zip("kv", scales, strict=True):
                tensors[f"model.layers.{layer}.self_attn.{kind}_scale"] = scale
        given.append((scales[0].to(DEVICE), scales[1].to(DEVICE)))
    save_file(tensors, target / "model.safetensors")
    return target, given
