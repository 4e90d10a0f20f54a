"""The host shadow with the memory of a GPU: experts go to locked host memory and come back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from ep_server.backends.shadow import copies_for
from ep_server.backends.torch_compute import TorchCompute
from tests.support.models.answers import Answers
from tests.support.models.shadow_loads import check_loads

pytestmark = pytest.mark.gpu


def test_experts_from_the_shadow_are_those_of_files(
    answers: dict[str, Answers], family: str, tmp_path: Path
) -> None:
    path = answers[family].path
    shutil.copytree(path, tmp_path / "poisoned")
    check_loads(path, tmp_path / "poisoned", "bfloat16", TorchCompute("cuda"))


def test_codes_and_scales_are_copied_alike(fp8_answers: dict[str, Answers], tmp_path: Path) -> None:
    path = fp8_answers["qwen3_moe-fp8"].path
    shutil.copytree(path, tmp_path / "poisoned")
    check_loads(path, tmp_path / "poisoned", "bfloat16", TorchCompute("cuda"))


def test_copies_wait_for_earlier_work_of_the_device() -> None:
    copies = copies_for(torch.device("cuda"))
    host = torch.arange(1 << 20, dtype=torch.int32).view(torch.uint8)
    copies.pin(host)
    held = torch.zeros_like(host, device="cuda")
    torch.cuda._sleep(200_000_000)
    seen = held.clone()  # behind the sleep: it reads what was there
    copies.begin()
    copies.upload(held, host)
    copies.finish()
    assert torch.equal(held.cpu(), host) and not seen.any()
    back = torch.zeros_like(host)
    held.add_(1)
    copies.begin()
    copies.download(back, [held[:4096], held[4096:]])
    assert torch.equal(back, host + 1)
    copies.unpin(host)
