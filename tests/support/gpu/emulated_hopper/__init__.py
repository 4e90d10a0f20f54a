"""Runs the Hopper kernel for attention of chunks on the CPU: its own code, from the launch to the last sum.

On the CUDA of tests/support/exchange/emulated. Hopper's own instructions (csrc/kernels/hopper/common) are
replaced: copies and products are done at once, by fibers. Shows what is computed, by which block and in which
order, not what a GPU may reorder.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.exchange import emulated
from tests.support.once import locked

HERE = Path(__file__).parent
PREFILL = emulated.CSRC / "kernels/hopper/prefill"
PARTS = emulated.Parts(
    "emulated_hopper",
    (
        PREFILL / "prefill.cu",
        PREFILL / "prefill.cpp",
        HERE / "bindings.cpp",
        emulated.HERE / "blocks.cpp",
        emulated.HERE / "runtime.cpp",
    ),
    (HERE, emulated.HERE, emulated.CSRC),
    "kernels/hopper/common/products.cuh",
)


@cache
def module() -> Any:
    """The module, compiled once for a state of the sources."""
    folder = emulated.ROOT / "build" / "emulated"
    with locked(folder / "hopper.lock"):
        path = emulated.build(folder, PARTS)
    loader = importlib.machinery.ExtensionFileLoader("emulated_hopper", str(path))
    spec = importlib.util.spec_from_file_location("emulated_hopper", path, loader=loader)
    assert spec is not None
    made = importlib.util.module_from_spec(spec)
    loader.exec_module(made)
    return made
