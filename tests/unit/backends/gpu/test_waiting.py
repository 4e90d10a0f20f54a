"""No wait for copies of counters lasts for ever; tests/gpu has a device that is really late."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from ep_server.backends.gpu import waiting
from ep_server.backends.gpu.waiting import Snapshot
from ep_server.errors import InternalError
from tests.support.gpu.streams import PassedStream

NEVER = float("inf")


@pytest.mark.parametrize("looks", [3, NEVER])
def test_copies_of_counters_have_a_deadline(looks: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies themselves are the CPU's here."""
    taken = Snapshot([torch.tensor([5, 6])])
    taken._stream = PassedStream(looks)  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(waiting, "COPY_SECONDS", 0.01 if looks == NEVER else 60)
    if looks != NEVER:
        assert [copy.tolist() for copy in taken.take()] == [[5, 6]]
        return
    with pytest.raises(InternalError, match=r"has not ended copies of counters in 0\.01 s"):
        taken.take()
