"""What comes to a GPU through pinned buffers is what is in the files, whoever's copies are late.

Here copies are made at the second look for their end; tests/gpu has a device whose copies are really late.
"""

from __future__ import annotations

import gc
import os
import re
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
from ep_server.models.checkpoint import Checkpoint, StoredTensor
from ep_server.models.experts import SlotMove, load_slots
from ep_server.models.families import read_spec
from ep_server.models.layers import ModelWeights, MoeWeights, tensors_of
from ep_server.models.loading import TensorReader
from ep_server.models.weights import load_weights, weights_from
from tests.support.compare import assert_equal
from tests.support.gpu.late_copies import LateCopies, module

if TYPE_CHECKING:
    from tests.support.models.checkpoints import Tiny
    from tests.support.models.fp8 import Fp8Tiny

SMALL = 96  # bytes of a buffer: most tensors take several


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
    expected, copies = written(tmp_path), LateCopies()
    stored = Checkpoint.open(tmp_path).tensors
    given = {name: torch.full((3, *tensor.shape), 0x7F).to(tensor.dtype) for name, tensor in expected.items()}
    before = {name: tensor.clone() for name, tensor in given.items()}

    def fill(names: list[str]) -> None:
        for name in names:
            files.fill(given[name][1], stored[name])
        files.flush()

    with StagedFiles(copies, buffer_bytes) as files, ThreadPoolExecutor(threads) as pool:
        loads = {name: pool.submit(files.load, tensor) for name, tensor in stored.items()}
        parts = [pool.submit(files.load, stored["stack"], part) for part in range(4)]
        names = list(stored)
        for filled in [pool.submit(fill, names[n::4]) for n in range(4)]:
            filled.result()
        got = {name: load.result() for name, load in loads.items()}
        entries = [load.result() for load in parts]
        files.finish()  # of what was loaded: a load that is still under way is not in it
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        assert (got[name].dtype, got[name].shape) == (values.dtype, values.shape)
        assert torch.equal(bits(got[name]), bits(values)), name
        assert torch.equal(bits(given[name][1]), bits(values)), name
        assert torch.equal(bits(given[name][::2]), bits(before[name][::2])), name
    for part, entry in enumerate(entries):
        assert_equal(entry, expected["stack"][part], f"part {part}")
    assert len(copies.asked) <= threads


def test_nothing_is_read_before_it_is_flushed(tmp_path: Path) -> None:
    written(tmp_path)
    stored, copies = Checkpoint.open(tmp_path).tensors["stack"], LateCopies()
    given = torch.full(stored.shape, float("nan"))
    with StagedFiles(copies, SMALL) as files:
        files.fill(given[0], stored, 0)
        files.fill(given[2], stored, 2)
        assert not copies.asked
        files.flush()
        assert len(copies.asked[0]) == 2
        files.flush()
        files.finish()
    assert len(copies.asked[0]) == 2
    assert given[[1, 3]].isnan().all()
    assert_equal(given[[0, 2]], load_file(tmp_path / "model.safetensors")["stack"][[0, 2]], "entries")


def test_copies_outlive_the_threads_that_began_them(tmp_path: Path) -> None:
    """Pinned memory that is given back may be written by its next owner at once."""
    expected, given = written(tmp_path)["stack"], torch.zeros(4, 5, 6)
    stored = Checkpoint.open(tmp_path).tensors["stack"]
    with StagedFiles(LateCopies()) as files:

        def fill(part: int) -> None:
            files.fill(given[part], stored, part)
            files.flush()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(fill, range(4)))
        gc.collect()
        files.finish()
    assert_equal(given, expected, "entries")


def test_copies_end_before_an_error_is_raised(tmp_path: Path) -> None:
    """The memory they write is given back then."""
    expected, given = written(tmp_path)["stack"], torch.zeros(5, 6)
    stored = Checkpoint.open(tmp_path).tensors["stack"]
    with pytest.raises(CheckpointError), StagedFiles(LateCopies()) as files:
        files.fill(given, stored, 2)
        files.flush()
        raise CheckpointError("another thread met a broken shard")
    assert_equal(given, expected[2], "entry")


def test_a_reader_that_cannot_be_made_leaves_no_event() -> None:
    copies, native = LateCopies(), module()
    gc.collect()
    before = native.events()
    native.limit_events(before + BUFFERS - 1)
    try:
        with pytest.raises(RuntimeError, match="cudaEventCreate: an error of the emulation"):
            copies.reader(SMALL)
    finally:
        native.limit_events(1 << 40)
    assert native.events() == before


def staged(path: Path, experts: list[int], dtype: torch.dtype, copies: LateCopies) -> ModelWeights:
    spec, checkpoint = read_spec(path), Checkpoint.open(path)
    with StagedFiles(copies, SMALL * 10) as files:
        reader = TensorReader(checkpoint, spec.quant_block, InTime(files))
        return weights_from(reader, spec, experts, dtype, TorchCompute(), threads=3)


class InTime:
    """Files of a device whose later work waits for its copies, as a stream does."""

    def __init__(self, files: StagedFiles) -> None:
        self._files, self.fill, self.finish = files, files.fill, files.finish

    def load(self, stored: StoredTensor, part: int | None = None) -> torch.Tensor:
        values = self._files.load(stored, part)
        self.finish()
        return values

    def flush(self) -> None:
        self._files.flush()
        self.finish()


def assert_same(path: Path, experts: list[int], dtype: torch.dtype) -> None:
    """Staged weights are those of plain files, to the bit."""
    copies = LateCopies()
    got = staged(path, experts, dtype, copies)
    expected = load_weights(Checkpoint.open(path), read_spec(path), experts, dtype, TorchCompute())
    pairs = list(zip(tensors_of(got), tensors_of(expected), strict=True))
    assert len(pairs) > 10
    for one, two in pairs:
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert torch.equal(bits(one), bits(two))
    assert 0 < len(copies.asked) <= 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["qwen3_moe", "mixtral-tied-stacked", "olmoe", "deepseek_v3", "qwen3_moe-dense-layer-bias-shards"]
)
def test_models_are_those_of_plain_files(tiny: Callable[[str], Tiny], name: str, dtype: torch.dtype) -> None:
    assert_same(tiny(name).path, [0, 4], dtype)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral-tied-stacked", "qwen3_moe-fp8"])
def test_experts_come_into_slots_that_are_there(
    tiny: Callable[[str], Tiny], fp8: Callable[[str], Fp8Tiny], name: str
) -> None:
    """As after a lost rank: several threads, values from before in the slots."""
    path, copies, compute = (fp8 if "fp8" in name else tiny)(name).path, LateCopies(), TorchCompute()
    spec, checkpoint, dtype = read_spec(path), Checkpoint.open(path), torch.bfloat16
    wanted = load_weights(checkpoint, spec, [3, 1, 2], dtype, compute)
    weights = load_weights(checkpoint, spec, [0, 0, 0], dtype, compute)
    layers = [number for number, layer in enumerate(weights.layers) if isinstance(layer.ffn, MoeWeights)]
    moves = [SlotMove(layer, slot, expert) for layer in layers for slot, expert in enumerate((3, 1, 2))]
    told = list[int]()
    with StagedFiles(copies, SMALL * 10) as files:
        reader = TensorReader(checkpoint, spec.quant_block, InTime(files))
        load_slots(reader, spec, dtype, compute, weights, moves, 3, lambda: told.append(1), 1 << 20)
    for layer in layers:
        got, expected = (tensors_of(w.layers[layer].ffn.experts) for w in (weights, wanted))
        for one, two in zip(got, expected, strict=True):
            assert torch.equal(bits(one), bits(two)), layer
    assert 3 <= len(told) <= len(moves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3_moe-fp8", "deepseek_v3-fp8"])
def test_so_are_fp8_models(fp8: Callable[[str], Fp8Tiny], name: str, dtype: torch.dtype) -> None:
    assert_same(fp8(name).path, [1, 3], dtype)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral-tied-stacked"])
def test_a_rank_reads_the_bytes_of_its_own_tensors(tiny: Callable[[str], Tiny], name: str) -> None:
    path, copies = tiny(name).path, LateCopies()
    staged(path, [1, 5], torch.float32, copies)
    read = [(piece.begin, piece.size) for pieces in copies.asked for piece in pieces]
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


def test_reads_may_end_early(tmp_path: Path) -> None:
    written(tmp_path)
    with StagedFiles(LateCopies(most_read=5), SMALL) as files:
        for name, stored in Checkpoint.open(tmp_path).tensors.items():
            expected, got = load_file(tmp_path / "model.safetensors")[name], files.load(stored)
            files.finish()
            assert torch.equal(bits(got), bits(expected)), name


def test_files_that_shrink_or_go_are_named(tmp_path: Path) -> None:
    written(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = Checkpoint.open(tmp_path).tensors
    last = max(stored.values(), key=lambda one: one.begin + one.nbytes)
    os.truncate(file, last.begin + 1)
    with StagedFiles(LateCopies()) as files:
        with pytest.raises(CheckpointError, match=rf"tensor {re.escape(last.name)}: .* ends at byte"):
            files.load(last)
        files.fill(torch.empty(4, 5, 6), stored["stack"])
        files.fill(torch.empty(last.shape, dtype=torch.uint8).view(-1), last)
        with pytest.raises(CheckpointError, match=rf"tensor {re.escape(last.name)}: .* ends at byte"):
            files.flush()
        files.flush()  # what failed is forgotten
        file.unlink()
    with StagedFiles(LateCopies()) as files, pytest.raises(CheckpointError, match=r"tensor one: .*No such"):
        files.load(stored["one"])


def test_a_folder_in_the_place_of_a_shard_is_named(tmp_path: Path) -> None:
    written(tmp_path)
    stored = Checkpoint.open(tmp_path).tensors["one"]
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with StagedFiles(LateCopies()) as files, pytest.raises(CheckpointError, match=r"tensor one: .*directory"):
        files.load(stored)


def test_a_copy_that_does_not_end_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    monkeypatch.setattr(staged_files, "COPY_SECONDS", 0.01)
    with (
        StagedFiles(LateCopies(hangs=True), SMALL) as files,
        pytest.raises(InternalError, match=r"weights: copies to the device do not end in 0\.01 s"),
    ):
        files.load(Checkpoint.open(tmp_path).tensors["torch.float32.7x41"])


def test_an_error_of_the_device_is_reported(tmp_path: Path) -> None:
    written(tmp_path)
    with (
        StagedFiles(LateCopies(fails=True)) as files,
        pytest.raises(InternalError, match=r"weights: cudaMemcpyAsync: an error of the emulation"),
    ):
        files.load(Checkpoint.open(tmp_path).tensors["one"])
