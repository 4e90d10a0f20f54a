"""A rank's model is loaded behind the ranks that serve on the same cores."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from ep_server.errors import CheckpointError
from ep_server.ranks import build
from ep_server.ranks.changes import NICE


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.parametrize(("behind", "expected"), [(True, NICE), (False, 0)])
def test_a_model_is_loaded_behind_ranks_that_serve(
    monkeypatch: pytest.MonkeyPatch, behind: bool, expected: int
) -> None:
    before = niceness()
    monkeypatch.setattr(build, "load_model", lambda *_: niceness())
    model: Any = build._model(None, lambda *_: None, None, behind=behind)  # type: ignore[arg-type]
    assert model == max(expected, before)
    assert niceness() == before  # steps run as ever


def test_an_error_of_loading_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise CheckpointError("broken")

    monkeypatch.setattr(build, "load_model", fail)
    with pytest.raises(CheckpointError, match="broken"):
        build._model(None, lambda *_: None, None, behind=True)  # type: ignore[arg-type]
