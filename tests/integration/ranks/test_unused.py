"""What of a checkpoint nobody reads is logged once; a tensor that should be read ends the start."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ep_server.errors import CheckpointError
from ep_server.models.checkpoint import SINGLE
from ep_server.ranks.launcher import RankProcesses
from tests.support.models.checkpoints import Tiny
from tests.support.ranks.rank_group import Recorder, rank_config


def copied(tiny: Tiny, path: Path, *tensors: str) -> Path:
    shutil.copytree(tiny.path, path)
    stored = load_file(path / SINGLE)
    save_file(stored | {name: torch.ones(3) for name in tensors}, path / SINGLE)
    return path


async def test_one_warning_for_all_ranks(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copied(tiny, tmp_path / "copy", "visual.a", "visual.b")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"logit_scale": 0.5}))
    group, heard = RankProcesses(rank_config(path, 2)), Recorder()
    with caplog.at_level(logging.WARNING):
        await group.start(heard, heard.on_progress)
        await group.stop()
    assert [r.getMessage() for r in caplog.records if "visual" in r.getMessage()] == [
        "there are tensors of the checkpoint that are not used (2: visual.a, visual.b) "
        "and keys of config.json that are not read (1: logit_scale)"
    ]


async def test_no_rank_starts_without_a_tensor_it_should_read(tiny: Tiny, tmp_path: Path) -> None:
    path = copied(tiny, tmp_path / "copy", "model.layers.0.self_attn.q_proj.bias")
    group, heard = RankProcesses(rank_config(path, 2)), Recorder()
    with pytest.raises(CheckpointError, match=r"attention_bias is false, but .*q_proj\.bias"):
        await group.start(heard, heard.on_progress)
    assert group.pids == []
