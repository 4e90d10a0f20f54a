"""What is said where the package was built without nvcc."""

from __future__ import annotations

import pytest

from ep_server.backends.gpu import capability
from ep_server.errors import StartupError


def test_a_package_without_cuda_says_what_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "NATIVE", "ep_server._nowhere")
    with pytest.raises(StartupError, match=r"^the exchange needs ep_server\._nowhere, .*nvcc"):
        capability.require_native("the exchange")
    monkeypatch.setattr(capability, "NATIVE", "ep_server.errors")
    capability.require_native("the exchange")
