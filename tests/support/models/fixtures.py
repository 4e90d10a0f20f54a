from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:  # the kernels' tests run where there is no transformers
    from tests.support.models.checkpoints import Tiny
    from tests.support.models.fp8 import Fp8Tiny


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """Checkpoints by case name, made once per session."""
    from transformers.utils import logging

    from tests.support.models.checkpoints import CASES, make

    logging.disable_progress_bar()
    made: dict[str, Tiny] = {}
    cases = {case.name: case for case in CASES}

    def get(name: str) -> Tiny:
        if name not in made:
            made[name] = make(cases[name], tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(scope="session")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Fp8Tiny]:
    """FP8 checkpoints by case name, made once per session."""
    from transformers.utils import logging

    from tests.support.models.fp8 import GQA, MLA, make

    logging.disable_progress_bar()
    made: dict[str, Fp8Tiny] = {}
    cases = {case.name: case for case in (GQA, MLA)}

    def get(name: str) -> Fp8Tiny:
        if name not in made:
            made[name] = make(cases[name], tmp_path_factory.mktemp(name))
        return made[name]

    return get
