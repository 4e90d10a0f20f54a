"""What is said of kernels that are compiled too late. That Triton calls the hook is a test of tests/gpu."""

from __future__ import annotations

import logging

import pytest
from triton import knobs

from ep_server.backends.gpu.kernels.triton.launch import Compilations


def test_only_what_a_step_waits_for_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    found = Compilations()

    def compile_one(name: str) -> None:
        hook = knobs.runtime.jit_post_compile_hook
        assert hook is not None
        hook(key="", repr=name, fn=None, compile={}, is_manual_warmup=False, already_compiled=False)

    with caplog.at_level(logging.WARNING):
        compile_one("early[num_warps=4]")
        found.expect_none()
        assert found.count == 1 and not caplog.messages
        compile_one("late[num_warps=4]")
    assert found.count == 2
    assert [m for m in caplog.messages if "late[num_warps=4]" in m] == caplog.messages != []
