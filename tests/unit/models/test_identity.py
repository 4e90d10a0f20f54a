"""Digests that tell weights apart: two servers with equal ones use each other's KV blocks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ep_server.errors import CheckpointError, ConfigError
from ep_server.models.checkpoint import Checkpoint
from ep_server.models.identity import check_files, files_identity, weights_digest

NAMES = [f"layers.{number}.weight" for number in range(40)]


def tensors() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return {name: torch.randn(7, 300, generator=made) for name in NAMES}


def write(path: Path, shards: list[dict[str, torch.Tensor]]) -> str:
    """A checkpoint of these shards. Returns: its digest."""
    path.mkdir()
    placed = {}
    for number, shard in enumerate(shards):
        save_file(shard, path / f"{number}.safetensors")
        placed |= dict.fromkeys(shard, f"{number}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return weights_digest(str(path))


def test_a_change_of_any_tensor_changes_the_digest(tmp_path: Path) -> None:
    """An update may leave all others as they are."""
    digests = {write(tmp_path / "as it was", [tensors()])}
    for name in NAMES:
        changed = tensors()
        changed[name] += 1e-3
        digests.add(write(tmp_path / name, [changed]))
    assert len(digests) == 1 + len(NAMES)


def test_files_may_be_cut_otherwise(tmp_path: Path) -> None:
    whole = tensors()
    halves = [{name: whole[name] for name in names} for names in (NAMES[::2], NAMES[1::2])]
    assert write(tmp_path / "one", [whole]) == write(tmp_path / "two", halves)


def test_a_missing_checkpoint_has_no_digest(tmp_path: Path) -> None:
    """Else two servers whose files were deleted would agree."""
    with pytest.raises(CheckpointError):
        weights_digest(str(tmp_path))


def test_files_that_hold_other_weights_are_found(tmp_path: Path) -> None:
    """Files that are only written again, or touched, hold the same."""
    path = tmp_path / "model"
    write(path, [tensors()])
    identity, shard = files_identity(str(path)), path / "0.safetensors"

    def check() -> None:
        check_files(Checkpoint.open(path), identity)

    check()
    os.utime(shard, ns=(1, 1))
    check()
    save_file(tensors() | {NAMES[7]: tensors()[NAMES[7]] + 1e-3}, shard)
    for _ in range(2):
        with pytest.raises(ConfigError, match="its files hold other weights now"):
            check()
    check_files(Checkpoint.open(path), "")
    save_file(tensors(), shard)
    check()
    opened = Checkpoint.open(path)
    shard.unlink()
    with pytest.raises(CheckpointError, match="shard cannot be read"):
        check_files(opened, identity)
