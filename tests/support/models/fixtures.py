"""Checkpoints that tests share. Made once for all processes of a run, see tests.support.once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch

from ep_server.models import loading
from tests.support.once import made_once

if TYPE_CHECKING:  # the kernels' tests run where there is no transformers
    from tests.support.models.checkpoints import Case, Tiny
    from tests.support.models.fp8 import Fp8Tiny

T = TypeVar("T")
_MADE: dict[str, Any] = {}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], Tiny]:
    """Checkpoints by case name."""
    from tests.support.models.checkpoints import CASES

    cases = {case.name: case for case in CASES}
    return lambda name: checkpoint(cases[name])


@pytest.fixture(scope="session")
def fp8() -> Callable[[str], Fp8Tiny]:
    """FP8 checkpoints by case name."""
    from tests.support.models.fp8 import GQA, MLA

    cases = {case.name: case for case in (GQA, MLA)}
    return lambda name: fp8_checkpoint(cases[name])


def checkpoint(case: Case) -> Tiny:
    """A random checkpoint, and what transformers answers to its prompts in float32."""
    from tests.support.models import checkpoints

    return _made(case, checkpoints.make)


def fp8_checkpoint(case: Case) -> Fp8Tiny:
    """A random checkpoint of FP8 weights, and transformers' answers for their values."""
    from tests.support.models import fp8

    return _made(case, fp8.make)


def _made(case: Case, make: Callable[[Case, Path], T]) -> T:
    if case.name not in _MADE:
        _MADE[case.name] = made_once(case.name, _sources(), partial(_in_one_thread, make, case))
    return _MADE[case.name]


def _in_one_thread(make: Callable[[Case, Path], T], case: Case, folder: Path) -> T:
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    folder.mkdir()
    return make(case, folder)


@cache
def _sources() -> tuple[str, ...]:
    """All that a checkpoint depends on."""
    from tests.support.models import checkpoints, fp8

    files = (checkpoints.__file__, fp8.__file__, loading.__file__)
    return (torch.__version__, version("transformers"), *(Path(file).read_text() for file in files))
