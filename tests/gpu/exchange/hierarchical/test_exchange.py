"""The exchange of two parts on GPUs: two or three hosts of them on one machine (marker gpu).

The programs import the CUDA part, which only a machine with a driver can: they are imported when they run.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.support.exchange.process_group import run_group
from tests.support.fabric.fabric_ends import loopback, needs, usable
from tests.support.fabric.suites import failures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GROUPS = {"one_each": (0, 1), "two_each": (0, 0, 1, 1), "one_and_two": (0, 1, 1)}


@pytest.mark.parametrize("program", ["whole_suite", "many_rows", "in_flight", "refused", "one_stops"])
@pytest.mark.parametrize("hosts", GROUPS.values(), ids=GROUPS)
def test_on_gpus(hosts: tuple[int, ...], program: str) -> None:
    library = next((name for name in ("wheel", "system") if not usable(name)), "system")
    needs(library)
    if torch.cuda.device_count() < max(hosts.count(host) for host in hosts):
        pytest.skip("needs a GPU for every rank of a host")
    run = getattr(importlib.import_module("tests.support.fabric.gpu_hierarchical"), program)
    results = run_group(run, len(hosts), args=(loopback(library), hosts), timeout=390)
    assert program != "whole_suite" or not failures(results)
