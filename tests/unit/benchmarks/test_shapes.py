"""The shapes that are measured have the sizes of the models they are named after."""

from __future__ import annotations

from pathlib import Path

import pytest

from ep_server.models.inspect import inspect_config

SHAPES = Path(__file__).parents[3] / "benchmarks" / "shapes"
BILLIONS = {
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-30b-a3b-fp8": (30.5, 3.3),
    "deepseek-v2-lite": (15.7, 2.7),
    "mixtral-8x7b": (46.7, 12.9),
    "small-moe": (0.1, 0.0),
    "qwen3-114m": (0.1, 0.0),
}


def test_every_shape_is_known() -> None:
    assert {path.name for path in SHAPES.iterdir()} == set(BILLIONS)


@pytest.mark.parametrize("name", BILLIONS)
def test_parameters_in_all_and_of_one_token(name: str) -> None:
    found = inspect_config(str(SHAPES / name))
    in_all, active = BILLIONS[name]
    assert found.total_parameters / 1e9 == pytest.approx(in_all, abs=0.1)
    assert found.active_parameters / 1e9 == pytest.approx(active, abs=0.2)
