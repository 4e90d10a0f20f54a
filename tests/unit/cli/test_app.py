"""What a server says about options that make it slow."""

from __future__ import annotations

import logging

import pytest

from ep_server.backends.gpu.graphs import captured_keys
from ep_server.cli.app import warn_if_prompts_are_slow
from ep_server.config import Config


@pytest.mark.parametrize(("running", "tokens"), [(64, 256), (255, 256), (256, 256), (300, 256)])
@pytest.mark.parametrize(("device", "graphs"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_sizes_that_leave_prompts_uncaptured_are_named(
    running: int, tokens: int, device: str, graphs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Those for which a rank captures nothing beyond steps of single tokens."""
    flags = {"scheduler.max_running": running, "scheduler.max_step_tokens": tokens}
    config = Config.load(flags={**flags, "parallel.device": device, "parallel.graphs": graphs}, environ={})
    single = min(running, tokens)
    prompts = any(form.bucket > single for form in captured_keys(single, tokens, "off"))
    with caplog.at_level(logging.WARNING):
        warn_if_prompts_are_slow(config)
    names = "scheduler.max_step_tokens = 256 is not above scheduler.max_running"
    assert (names in caplog.text) == (device == "cuda" and graphs and not prompts)
