from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.models.answers import Answers, read

PREPARED = Path(__file__).parents[2] / "build" / "gpu" / "answers"


@pytest.fixture(scope="session")
def answers() -> dict[str, Answers]:
    """What `gpu_check bring` has made, by name."""
    return prepared(PREPARED)


@pytest.fixture(scope="session")
def fp8_answers() -> dict[str, Answers]:
    """Of checkpoints with FP8 weights."""
    return prepared(PREPARED / "fp8")


def prepared(folder: Path) -> dict[str, Answers]:
    found = {one.name: one for one in read(folder)}
    if not found:
        pytest.skip(f"{folder} is empty: `scripts/gpu_check bring` fills it where transformers is")
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", [one.name for one in read(PREPARED)] or ["none"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
