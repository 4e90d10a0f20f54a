"""Plain files hold what safetensors reads, and name a file that cannot be read."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ep_server.errors import CheckpointError
from ep_server.models.checkpoint import Checkpoint
from ep_server.models.loading import PlainFiles
from tests.support.compare import assert_equal

CPU = torch.device("cpu")


def written(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors of many dtypes, one of no elements, one of no dimensions, and a last one of several pages."""
    torch.manual_seed(3)
    tensors = {
        f"{dtype}.{rows}": torch.randn(rows, 41).mul(50).to(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64)
        for rows in (0, 1, 7)
    }
    tensors |= {"one": torch.tensor(7.0), "stack": torch.randn(4, 5, 6), "z": torch.randn(9, 4096).half()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


def test_tensors_are_those_of_the_file(tmp_path: Path) -> None:
    expected = written(tmp_path)
    with PlainFiles(CPU) as files:
        for name, stored in Checkpoint.open(tmp_path).tensors.items():
            into = torch.ones(expected[name].shape, dtype=expected[name].dtype)
            files.fill(into, stored)
            for found in (into, files.load(stored)):
                assert torch.equal(
                    found.view(-1).view(torch.uint8), expected[name].view(-1).view(torch.uint8)
                )
            if name == "stack":
                for part in range(4):
                    assert_equal(files.load(stored, part), expected[name][part], "entry")


def test_a_file_that_shrinks_is_named(tmp_path: Path) -> None:
    """Behind a mapping, its lost pages would end the process."""
    written(tmp_path)
    stored = Checkpoint.open(tmp_path).tensors
    last = max(stored.values(), key=lambda one: one.begin + one.nbytes)
    with PlainFiles(CPU) as files:
        files.load(last)
        os.truncate(last.file, last.begin + 1)
        with pytest.raises(CheckpointError, match=rf"tensor {re.escape(last.name)}: .* ends at byte"):
            files.load(last)
        with pytest.raises(CheckpointError, match=rf"tensor {re.escape(last.name)}: .* ends at byte"):
            files.fill(torch.empty(last.shape, dtype=torch.uint16), last)
        files.load(stored["one"])


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    written(tmp_path)
    stored = Checkpoint.open(tmp_path).tensors["one"]
    stored.file.unlink()
    with PlainFiles(CPU) as files, pytest.raises(CheckpointError, match=r"tensor one: .*No such"):
        files.load(stored)
