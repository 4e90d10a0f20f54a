"""What comes to a GPU through pinned buffers is what is in the files, whoever's copies are late.

Here copies are a list, or made at once; tests/gpu has a device whose copies are really late.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from ep_server.backends.gpu import staged_files
from ep_server.backends.gpu.staged_files import BUFFERS, StagedFiles
from ep_server.backends.torch_compute import TorchCompute
from ep_server.errors import CheckpointError, InternalError
from ep_server.models.checkpoint import Checkpoint
from ep_server.models.families import read_spec
from ep_server.models.layers import ModelWeights, tensors_of
from ep_server.models.loading import TensorReader
from ep_server.models.weights import load_weights, weights_from
from tests.support.compare import assert_equal

if TYPE_CHECKING:
    from tests.support.models.checkpoints import Tiny
    from tests.support.models.fp8 import Fp8Tiny

SMALL = 96  # bytes of a buffer: most tensors take several
CPU = torch.device("cpu")
READ = os.preadv


class Prompt:
    """Copies that have ended when they begin."""

    device = CPU

    def __init__(self) -> None:
        self.buffers = 0

    def buffer(self, size: int) -> torch.Tensor:
        self.buffers += 1
        return torch.empty(size, dtype=torch.uint8)

    def start(self, into: torch.Tensor, values: torch.Tensor) -> Copy:
        copy = Copy(into, values)
        copy.make()
        return copy

    def finish(self) -> None:
        pass


class Late(Prompt):
    """Copies that are made at the second look at them, or in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[Copy] = []

    def start(self, into: torch.Tensor, values: torch.Tensor) -> Copy:
        self.started.append(Copy(into, values))
        return self.started[-1]

    def finish(self) -> None:
        for copy in self.started:
            copy.make()


class Copy:
    """Both the copy and the event behind it."""

    def __init__(self, into: torch.Tensor, values: torch.Tensor) -> None:
        self.looks, self.made = 0, False
        self.into, self.values = into, values

    def make(self) -> None:
        if not self.made:
            self.into.copy_(self.values)
        self.made = True

    def query(self) -> bool:
        self.looks += 1
        if self.looks > 1:
            self.make()
        return self.made


def written(folder: Path) -> dict[str, torch.Tensor]:
    """model.safetensors with tensors of many dtypes and sizes, one of no elements, one of no dimensions."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64)
    torch.manual_seed(3)
    tensors = {
        f"{dtype}.{rows}x{columns}": torch.randn(rows, columns).mul(50).to(dtype)
        for dtype in dtypes
        for rows, columns in ((1, 1), (3, 16), (7, 41), (0, 5))
    }
    tensors["stack"] = torch.randn(4, 5, 6)
    tensors["one"] = torch.tensor(7.0)
    save_file(tensors, folder / "model.safetensors")
    return tensors


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("buffer_bytes", [SMALL, 1 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_late_copies_find_the_bytes_of_the_files(tmp_path: Path, buffer_bytes: int, threads: int) -> None:
    expected, copies = written(tmp_path), Late()
    stored = Checkpoint.open(tmp_path).tensors
    with StagedFiles(copies, buffer_bytes) as files, ThreadPoolExecutor(threads) as pool:
        loads = {name: pool.submit(files.load, tensor) for name, tensor in stored.items()}
        parts = [pool.submit(files.load, stored["stack"], part) for part in range(4)]
        given = torch.full((3, 7, 41), float("nan"))
        pool.submit(files.load, stored["torch.float32.7x41"], None, given[1]).result()
        got = {name: load.result() for name, load in loads.items()}
        entries = [load.result() for load in parts]
        files.finish()  # of what was loaded: a load that is still under way is not in it
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        assert (got[name].dtype, got[name].shape) == (values.dtype, values.shape)
        assert torch.equal(bits(got[name]), bits(values)), name
    for part, entry in enumerate(entries):
        assert_equal(entry, expected["stack"][part], f"part {part}")
    assert_equal(given[1], expected["torch.float32.7x41"], "given memory")
    assert given[[0, 2]].isnan().all()
    assert copies.buffers <= BUFFERS * threads


def staged(path: Path, experts: list[int], dtype: torch.dtype, copies: Prompt) -> ModelWeights:
    spec, checkpoint = read_spec(path), Checkpoint.open(path)
    with StagedFiles(copies, SMALL * 10) as files:
        reader = TensorReader(checkpoint, spec.quant_block, files)
        return weights_from(reader, spec, experts, dtype, TorchCompute(), threads=3)


def assert_same(path: Path, experts: list[int], dtype: torch.dtype) -> None:
    """Staged weights are those of mapped files, to the bit."""
    copies = Prompt()
    got = staged(path, experts, dtype, copies)
    expected = load_weights(Checkpoint.open(path), read_spec(path), experts, dtype, TorchCompute())
    pairs = list(zip(tensors_of(got), tensors_of(expected), strict=True))
    assert len(pairs) > 10
    for one, two in pairs:
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert torch.equal(bits(one), bits(two))
    assert 0 < copies.buffers <= 3 * BUFFERS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["qwen3_moe", "mixtral-tied-stacked", "olmoe", "deepseek_v3", "qwen3_moe-dense-layer-bias-shards"]
)
def test_models_are_those_of_mapped_files(tiny: Callable[[str], Tiny], name: str, dtype: torch.dtype) -> None:
    assert_same(tiny(name).path, [0, 4], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3_moe-fp8", "deepseek_v3-fp8"])
def test_so_are_fp8_models(fp8: Callable[[str], Fp8Tiny], name: str, dtype: torch.dtype) -> None:
    assert_same(fp8(name).path, [1, 3], dtype)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral-tied-stacked"])
def test_a_rank_reads_the_bytes_of_its_own_tensors(
    tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path, lock = tiny(name).path, threading.Lock()
    read: list[tuple[int, int]] = []

    def recording(file: int, buffers: list[memoryview], begin: int) -> int:
        with lock:
            read.append((begin, buffers[0].nbytes))
        return READ(file, buffers, begin)

    monkeypatch.setattr(os, "preadv", recording)
    staged(path, [1, 5], torch.float32, Prompt())
    expected = []
    for one in Checkpoint.open(path).tensors.values():
        if one.name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            part = one.nbytes // one.shape[0]
            expected += [(one.begin + part * expert, part) for expert in (1, 5)]
        elif ".experts." not in one.name or ".experts.1." in one.name or ".experts.5." in one.name:
            expected.append((one.begin, one.nbytes))
    assert sum(size for _, size in read) == sum(size for _, size in expected)
    assert {at for begin, size in read for at in (begin, begin + size - 1)} <= {
        at for begin, size in expected for at in range(begin, begin + size)
    }


def test_reads_may_end_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    monkeypatch.setattr(os, "preadv", lambda file, to, begin: READ(file, [to[0][:5]], begin))
    with StagedFiles(Prompt(), SMALL) as files:
        for name, stored in Checkpoint.open(tmp_path).tensors.items():
            expected = load_file(tmp_path / "model.safetensors")[name]
            assert torch.equal(bits(files.load(stored)), bits(expected)), name


def test_files_that_shrink_or_go_are_named(tmp_path: Path) -> None:
    written(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = Checkpoint.open(tmp_path).tensors
    last = max(stored.values(), key=lambda one: one.begin + one.nbytes)
    os.truncate(file, last.begin + 1)
    with StagedFiles(Prompt()) as files:
        with pytest.raises(CheckpointError, match=rf"tensor {re.escape(last.name)}: .* ends at byte"):
            files.load(last)
        file.unlink()
    with (
        StagedFiles(Prompt()) as files,
        pytest.raises(CheckpointError, match=r"tensor one: .*No such"),
    ):
        files.load(stored["one"])


def test_a_copy_that_does_not_end_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    monkeypatch.setattr(staged_files, "COPY_SECONDS", 0.01)
    monkeypatch.setattr(Copy, "query", lambda self: False)
    with (
        StagedFiles(Late(), SMALL) as files,
        pytest.raises(InternalError, match=r"has not ended copies of weights in 0\.01 s"),
    ):
        files.load(Checkpoint.open(tmp_path).tensors["torch.float32.7x41"])
