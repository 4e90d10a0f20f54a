from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:  # the kernels' tests run where there is no transformers
    from tests.harness.checkpoints import Tiny


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """Checkpoints by case name, made once per session."""
    from transformers.utils import logging

    from tests.harness.checkpoints import CASES, make

    logging.disable_progress_bar()
    made: dict[str, Tiny] = {}
    cases = {case.name: case for case in CASES}

    def get(name: str) -> Tiny:
        if name not in made:
            made[name] = make(cases[name], tmp_path_factory.mktemp(name))
        return made[name]

    return get
