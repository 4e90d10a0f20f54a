"""The host shadow: what ranks write into it and load from it. Oracle: models loaded from files."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ep_server.backends.assembly import LoadParams, load_model
from ep_server.backends.cpu.native_compute import NativeCompute
from ep_server.backends.shadow import PlainCopies
from ep_server.backends.torch_compute import TorchCompute
from ep_server.errors import Unavailable
from ep_server.models.compute import Compute
from ep_server.models.shadow import PAGE, ShadowLayout
from tests.support.models.checkpoints import EXPERTS, Tiny
from tests.support.models.fp8 import GQA, make
from tests.support.models.shadow_loads import check_loads, shadow_of

Get = Callable[[str], Tiny]
COMPUTES = pytest.mark.parametrize("compute", [NativeCompute(1), TorchCompute()], ids=["native", "torch"])


@COMPUTES
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral-tied-stacked", "deepseek_v2-lite-yarn"])
def test_experts_from_the_shadow_are_those_of_files(
    tiny: Get, tmp_path: Path, name: str, compute: Compute
) -> None:
    shutil.copytree(tiny(name).path, tmp_path / "poisoned")
    check_loads(tiny(name).path, tmp_path / "poisoned", "float32", compute)


def test_codes_and_scales_are_copied_alike(tmp_path: Path) -> None:
    made = make(GQA, tmp_path / "fp8")
    shutil.copytree(made.path, tmp_path / "poisoned")
    check_loads(made.path, tmp_path / "poisoned", "bfloat16", TorchCompute())


def test_an_entry_that_changes_while_it_is_read_is_not_used(tiny: Get) -> None:
    path, compute = tiny("qwen3_moe").path, TorchCompute()
    params = LoadParams(str(path), 0, (0,) * EXPERTS, "float32", compute=compute)
    model = load_model(params)
    with shadow_of(path, compute, "float32") as shadow:
        own = params.slots(model.spec)
        with ThreadPoolExecutor(1) as pool:
            shadow.save(model.weights, own, 0, pool)

        class Late(PlainCopies):
            def finish(self) -> None:
                """Another rank begins to write new weights meanwhile."""
                shadow._tags[shadow.layout.number(own[0].layer, own[0].expert)] = 0

        shadow.copies = Late()
        assert shadow.load(model.weights, own, 0) == own[:1]


def test_entries_have_pages_of_their_own() -> None:
    layout = ShadowLayout((False, True, True), 3, PAGE + 1)
    assert layout.nbytes == PAGE + 6 * 2 * PAGE
    assert [layout.number(1, 0), layout.number(1, 2), layout.number(2, 0)] == [0, 2, 3]


def test_missing_memory_is_an_error_and_no_signal(tiny: Get) -> None:
    """The file is too short for its mapping, as if the system had no more pages for it."""
    path, compute = tiny("qwen3_moe").path, TorchCompute()
    params = LoadParams(str(path), 0, (0,) * EXPERTS, "float32", compute=compute)
    model = load_model(params)
    with shadow_of(path, compute, "float32") as shadow, ThreadPoolExecutor(1) as pool:
        assert shadow._fd is not None
        own = params.slots(model.spec)
        os.ftruncate(shadow._fd, PAGE)  # the tags
        with pytest.raises(Unavailable, match="no memory for"):
            shadow.save(model.weights, own, 0, pool)
        os.ftruncate(shadow._fd, shadow.layout.nbytes)
        assert shadow.save(model.weights, own, 0, pool) == len(own)


def test_a_failed_save_leaves_no_writes_behind(tiny: Get) -> None:
    path, compute = tiny("qwen3_moe").path, TorchCompute()
    params = LoadParams(str(path), 0, (0,) * EXPERTS, "float32", compute=compute)
    model, running = load_model(params), threading.Event()
    with shadow_of(path, compute, "float32") as shadow, ThreadPoolExecutor(2) as pool:
        own, ended = params.slots(model.spec), list[int]()

        def write(version: int, layer: int, entry: int, parts: object) -> None:
            """The first one fails while the second one runs."""
            if (layer, entry) == (own[0].layer, own[0].expert):
                running.wait(60)
                raise Unavailable("no memory")
            running.set()
            time.sleep(0.2)
            ended.append(entry)

        shadow.write = write  # type: ignore[method-assign]
        with pytest.raises(Unavailable):
            shadow.save(model.weights, own, 0, pool)
        count = len(ended)
        pool.shutdown()
        assert len(ended) == count > 0
