from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.utils import logging

from tests.harness.checkpoints import CASES, Tiny, make


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """Checkpoints by case name, made once per session."""
    made: dict[str, Tiny] = {}
    cases = {case.name: case for case in CASES}

    def get(name: str) -> Tiny:
        if name not in made:
            made[name] = make(cases[name], tmp_path_factory.mktemp(name))
        return made[name]

    return get
