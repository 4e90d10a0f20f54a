"""Settings of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Triton decides at its import, which some library may cause, whether kernels are compiled or interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No test asserts on time, also not through a deadline per example: a busy machine is not a failure.
# Examples are the same in every run, so that only a change of the code can fail one. `make test-slow` draws
# new ones with --hypothesis-profile=random. A failure that it finds becomes an @example.
_COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("project", _COMMON, derandomize=True)
settings.register_profile("random", _COMMON, derandomize=False, max_examples=1000, print_blob=True)
settings.load_profile("project")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skipped test is a failure")
    parser.addoption(
        "--ranks-per-gpu", type=int, default=1, help="how many ranks of a test may share a GPU (slow)"
    )
    parser.addoption("--part", help="RANKS[-slow]:I/N: the I-th of N parts of the tests of so many ranks")


@pytest.hookimpl(trylast=True)  # of what -k and -m leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked long come first: the last worker would run them alone."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if text := config.getoption("--part"):
        from tests.support.parts import Part

        mine = Part.parse(text).of(items)
        kept = set(mine)
        config.hook.pytest_deselected(items=[each for each in items if each not in kept])
        items[:] = mine


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked gpu that need more than there is: num_ranks may share GPUs, num_gpus may not."""
    if item.get_closest_marker("gpu") is None or not isinstance(item, pytest.Function):
        return
    import torch

    params = item.callspec.params if hasattr(item, "callspec") else {}
    here, per_gpu = torch.cuda.device_count(), item.config.getoption("--ranks-per-gpu")
    if params.get("num_gpus", 0) > here or params.get("num_ranks", 0) > here * per_gpu:
        pytest.skip(f"{params} needs more than {here} GPUs with {per_gpu} ranks on each")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if item.config.getoption("--no-skips") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"{item.nodeid} was skipped: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    if collector.config.getoption("--no-skips") and report.skipped:  # of a whole module
        report.outcome, report.longrepr = "failed", f"{collector.nodeid} was skipped: {report.longrepr}"
    return report
