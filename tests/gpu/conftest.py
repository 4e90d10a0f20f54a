from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness.answers import Answers, read

PREPARED = Path(__file__).parents[2] / "build" / "gpu" / "answers"


@pytest.fixture(scope="session")
def answers() -> dict[str, Answers]:
    """What `gpu_check bring` has made, by name."""
    found = {one.name: one for one in read(PREPARED)}
    if not found:
        pytest.skip(f"{PREPARED} is empty: `scripts/gpu_check bring` fills it where transformers is")
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", [one.name for one in read(PREPARED)] or ["none"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
